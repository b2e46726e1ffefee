# Sourced by ./run and ./test: makes .venv if it is missing, and installs the package if constraints.txt or
# pyproject.toml changed. Prints one line per step.

say() { printf 'kl-lens: %s\n' "$*" >&2; }

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      printf '%s' "$candidate"
      return 0
    fi
  done
  say "no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python3 $0"
  return 1
}

# ensure_environment ROOT EXTRAS: installs the package with these extras in ROOT/.venv.
ensure_environment() {
  local root=$1 extras=$2 venv="$1/.venv" python wanted stamp
  if ! "$venv/bin/python" -c '' >/dev/null 2>&1; then
    python=$(find_python) || return 1
    say "making .venv with $("$python" --version)"
    rm -rf "$venv"
    if ! "$python" -m venv "$venv"; then
      say "'$python -m venv' failed; on Debian and Ubuntu: apt install python3-venv"
      return 1
    fi
  fi
  wanted=$(cat "$root/constraints.txt" "$root/pyproject.toml" | cksum)
  stamp="$venv/.installed-$(printf '%s' "$extras" | tr ',' '-')"
  # A larger set of extras includes a smaller one.
  local known extra lacks
  for known in "$venv"/.installed-*; do
    [ "$(cat "$known" 2>/dev/null)" = "$wanted" ] || continue
    lacks=
    for extra in ${extras//,/ }; do
      case "-${known##*/.installed-}-" in *"-$extra-"*) ;; *) lacks=$extra ;; esac
    done
    [ -z "$lacks" ] && return 0
  done
  say "installing kl-lens[$extras] and its dependencies (once, a few minutes)"
  if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
      --constraint "$root/constraints.txt" --editable "$root[$extras]" 2>"$venv/install.log"; then
    cat "$venv/install.log" >&2
    say "installation failed; see the messages above"
    return 1
  fi
  printf '%s' "$wanted" >"$stamp"
  say "installed"
}

KL_LENS_RUN_EXTRAS=openvino,gguf
KL_LENS_TEST_EXTRAS=openvino-gguf-mlx-compressed-eval-dev
# Those that ask most of a system: locks, files that are replaced, processes, every verb.
KL_LENS_SYSTEM_TESTS="tests/base tests/run tests/planning/test_files.py tests/targets/test_toy_target.py
  tests/cli/test_outputs.py tests/cli/test_failures.py tests/cli/test_export.py tests/cli/test_report.py"
