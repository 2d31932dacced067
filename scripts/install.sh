# Sourced by train.sh and scripts/test.sh: puts trainkit into an environment once, with the versions of
# constraints.txt, and sets $python. A second call finds its stamp and installs nothing.
#
#   VIRTUAL_ENV / CONDA_PREFIX   the active environment is used
#   TRAINKIT_PYTHON=PYTHON       use this interpreter as it is and install nothing (containers)
#   otherwise                    .venv in the repository

install_trainkit() { # install_trainkit EXTRAS
  local extras=$1 build stamp
  if [ -n "${TRAINKIT_PYTHON:-}" ]; then
    python=$TRAINKIT_PYTHON
    return
  fi
  local environment=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
  if [ -z "$environment" ]; then
    environment=$repository/.venv
    [ -x "$environment/bin/python" ] || make_environment "$environment"
  fi
  python=$environment/bin/python
  build=cpu
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then build=cuda; fi
  stamp=$environment/.trainkit-$(cat "$repository/constraints.txt" "$repository/pyproject.toml" |
    "$python" -I -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read() + sys.argv[1].encode()).hexdigest()[:16])' \
      "$repository $extras $build")
  [ ! -e "$stamp" ] || return 0
  echo "installing trainkit [$extras] for $build into $environment" >&2
  install_torch "$build"
  "$python" -I -m pip install --quiet --disable-pip-version-check --constraint "$repository/constraints.txt" \
    --editable "$repository[$extras]"
  touch "$stamp"
}

make_environment() { # make_environment DIRECTORY
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
    if "$candidate" -I -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      "$candidate" -I -m venv "$1"
      return
    fi
  done
  echo "trainkit needs Python >= 3.10 with venv" >&2
  return 2
}

# A plain torch from PyPI drags in gigabytes of CUDA. Where there is no GPU the CPU build is named: from
# the configured indexes if they have it, else from PyTorch's own.
install_torch() { # install_torch cpu|cuda
  local version pip=("$python" -I -m pip install --quiet --disable-pip-version-check)
  version=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$repository/constraints.txt")
  if "$python" -I -c "import sys, importlib.metadata as m; sys.exit(m.version('torch').split('+')[0] != '$version')" 2>/dev/null; then
    return
  fi
  if [ "$1" = cuda ] || [ "$(uname -s)" = Darwin ]; then
    "${pip[@]}" "torch==$version"
  else
    "${pip[@]}" "torch==$version+cpu" 2>/dev/null ||
      "${pip[@]}" --index-url https://download.pytorch.org/whl/cpu "torch==$version+cpu"
  fi
}
