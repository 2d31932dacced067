#!/usr/bin/env bash
# A folder of wheels from which trainkit installs on a machine without a network.
#
#   bash scripts/wheelhouse.sh [--extras qlora,eval] [--cpu] [DIRECTORY]       DIRECTORY: wheelhouse
#
# Run it with a network, on the same kind of system and with the same Python as the target
# (PYTHON=python3.12 bash scripts/wheelhouse.sh picks one). Then, over there:
#
#   pip install --no-index --find-links DIRECTORY -c DIRECTORY/constraints.txt 'trainkit[qlora,eval]'
#
#   --extras A,B   the extras of pyproject.toml that the wheels are for; none if not given
#   --cpu          torch's CPU build, some hundred MB instead of gigabytes of CUDA
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
extras="" build=cuda directory=wheelhouse
while [ $# -gt 0 ]; do
  case $1 in
    --extras) extras=${2:?--extras needs a list such as qlora,eval}; shift ;;
    --cpu) build=cpu ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
    -*) echo "unknown option $1; see --help" >&2; exit 2 ;;
    *) directory=$1 ;;
  esac
  shift
done
if ! "$python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
  echo "$python must be Python >= 3.10 with pip; name another one with PYTHON=" >&2
  exit 2
fi
if [ -e "$directory" ] && [ -n "$(ls -A "$directory")" ]; then
  echo "$directory is not empty: name a new directory, so that it holds one set of versions" >&2
  exit 2
fi
mkdir -p "$directory"
directory=$(cd "$directory" && pwd)

# Built from a copy: setuptools leaves its files where it builds. Packages that come as sources only
# (deepspeed) are built here as well, for the target has no network to build them with.
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
cp -R "$repository/trainkit" "$repository/pyproject.toml" "$repository/README.md" "$source"
cp "$repository/constraints.txt" "$directory"

wanted=("$source${extras:+[$extras]}")
index=()
if [ "$build" = cpu ]; then
  version=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$repository/constraints.txt")
  wanted+=("torch==$version+cpu")
  if ! "$python" -m pip download --quiet --no-deps --dest "$source/torch" "torch==$version+cpu" 2>/dev/null; then
    index=(--extra-index-url https://download.pytorch.org/whl/cpu)
  fi
fi
"$python" -m pip wheel --quiet --disable-pip-version-check --constraint "$directory/constraints.txt" \
  "${index[@]}" --wheel-dir "$directory" "${wanted[@]}" setuptools wheel
(cd "$directory" && sha256sum -- *.whl >SHA256SUMS)

echo "$(find "$directory" -name '*.whl' | wc -l) wheels, $(du -sh "$directory" | cut -f1), for $("$python" -V) on $(uname -sm)"
echo "there: sha256sum -c SHA256SUMS in that folder, then"
echo "  pip install --no-index --find-links ${directory##*/} -c ${directory##*/}/constraints.txt 'trainkit${extras:+[$extras]}'"
