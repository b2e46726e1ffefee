#!/usr/bin/env bash
# ./test --arm: tests that depend on the processor (kernels, formats, quantizers, a sweep, one file per target), on ARM.
# On an ARM machine they run directly; elsewhere in a Debian root for arm64 under qemu (needs root; this path has
# not been tried yet). Correctness only: timings mean nothing here.
#
# KL_LENS_ARM_ROOT: folder of the root (default: .arm). KL_LENS_ARM_WHEELS: a folder of preferred wheels, because PyPI's
# torch for aarch64 comes with gigabytes of CUDA libraries. PIP_INDEX_URL and proxies are passed on.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/scripts/environment.sh"
arm=${KL_LENS_ARM_ROOT:-$root/.arm}
extras=openvino,gguf,dev
selection=(tests/model/test_kernels.py tests/weights/formats tests/weights/test_methods.py tests/measuring/test_processors.py
  tests/targets/gguf/test_activations.py tests/targets/gguf/test_export.py
  tests/targets/openvino/test_constants.py tests/targets/openvino/test_deployed.py)

case $(uname -m) in
  aarch64 | arm64)
    ensure_environment "$root" "$extras"
    cd "$root"
    exec .venv/bin/python -m pytest -m "not slow" "${selection[@]}" "$@"
    ;;
esac

[ "$(id -u)" = 0 ] || { say "--arm needs root to make a root file system; or run it on an ARM machine"; exit 1; }
for tool in debootstrap qemu-aarch64-static; do
  command -v $tool >/dev/null || { say "no $tool; Debian: apt install debootstrap qemu-user-static"; exit 1; }
done
formats=/proc/sys/fs/binfmt_misc
[ -e $formats/register ] || mount -t binfmt_misc binfmt_misc $formats
if [ ! -e $formats/qemu-aarch64 ]; then
  # The first bytes of an ELF for aarch64. F: open qemu now, so that it also works inside the root.
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
