#!/usr/bin/env bash
# ./test --arm: what differs between processors (kernels, formats, quantizers, a sweep, one file of each target), on ARM.
# On an ARM machine here and now; elsewhere in a Debian root for arm64 that qemu runs (as root; that half
# has not been run yet). Correctness alone: nothing timed here means anything.
#
# KL_LENS_ARM_ROOT: where the root is kept (default: .arm). KL_LENS_ARM_WHEELS: a folder of wheels that are preferred: PyPI's
# torch for aarch64 brings CUDA's libraries, gigabytes that nobody uses there. PIP_INDEX_URL and proxies are handed in.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/scripts/environment.sh"
arm=${KL_LENS_ARM_ROOT:-$root/.arm}
extras=openvino,gguf,dev
selection=(tests/checkpoints/test_kernels.py tests/formats tests/quantizers tests/sensitivity/test_processors.py
  tests/targets/gguf/test_activations.py tests/targets/gguf/test_export.py
  tests/targets/openvino/test_constants.py tests/targets/openvino/test_deployed.py)

case $(uname -m) in
  aarch64 | arm64)
    ensure_environment "$root" "$extras"
    cd "$root"
    exec .venv/bin/python -m pytest -m "not slow" "${selection[@]}" "$@"
    ;;
esac

[ "$(id -u)" = 0 ] || { say "--arm makes a root file system and needs root; or run it on an ARM machine"; exit 1; }
for tool in debootstrap qemu-aarch64-static; do
  command -v $tool >/dev/null || { say "no $tool; Debian: apt install debootstrap qemu-user-static"; exit 1; }
done
formats=/proc/sys/fs/binfmt_misc
[ -e $formats/register ] || mount -t binfmt_misc binfmt_misc $formats
if [ ! -e $formats/qemu-aarch64 ]; then
  # The first bytes of an ELF for aarch64. F: qemu is opened now, so that it is found inside the root too.
  magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
  mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
  echo ":qemu-aarch64:M::$magic:$mask:$(command -v qemu-aarch64-static):F" >$formats/register
fi
if [ ! -e "$arm/.made" ]; then
  say "making a Debian root for arm64 in $arm"
  rm -rf "$arm"
  debootstrap --arch=arm64 --variant=minbase \
    --include=python3,python3-venv,python3-pip,ca-certificates,libgomp1 bookworm "$arm" >/dev/null
  touch "$arm/.made"
fi
mkdir -p "$arm/source"
tar -C "$root" -c --exclude=./.arm --exclude=./.venv --exclude=./.git --exclude=./runs . | tar -x -C "$arm/source"
cp /etc/resolv.conf "$arm/etc/resolv.conf"
if [ -n "${KL_LENS_ARM_WHEELS:-}" ]; then
  mkdir -p "$arm/wheels"
  cp "$KL_LENS_ARM_WHEELS"/*.whl "$arm/wheels/"
  export PIP_FIND_LINKS=/wheels
fi
inside() { chroot "$arm" env HOME=/root OMP_NUM_THREADS=1 KL_LENS_ARM_ROOT= "$@"; }
inside bash -c '. /source/scripts/environment.sh; ensure_environment /source "$1"' - "$extras"
inside bash -c 'cd /source && exec .venv/bin/python -m pytest -m "not slow" "$@"' - "${selection[@]}" "$@"
