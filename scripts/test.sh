#!/usr/bin/env bash
# Install the test extras and pass the tests; with --all in every case, not the samples alone.
# Other arguments go to pytest.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/install.sh
source "$repository/scripts/install.sh"
# Python compiles what is imported; compiling all of every package takes most of a minute.
PIP_COMPILE=0 install_trainkit test
cd "$repository"
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [ $# -gt 0 ] && [ "$*" != --all ]; then exec "$python" -m pytest "$@"; fi

"$python" scripts/count.py
"$python" -m ruff check .
"$python" -m ruff format --check .
# mypy takes one of CI's two cores; the other compiles what both workers are about to import.
"$python" -m mypy & types=$!
trap 'kill "$types" 2>/dev/null || true' EXIT
"$(dirname "$python")/lint-imports"
"$python" -c "import deepspeed, trainkit.cli.commands.sft, trainkit.train.build" >/dev/null
wait "$types"
# Two workers for the two cores. A file stays on one of them: its tests share fixtures. Files come
# in the order of tests/conftest.py.
"$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
# Triton's kernels themselves, run by its interpreter on CPU tensors. The variable must be set before
# Python starts, so they are a run of their own. (The families start theirs by themselves.)
TRITON_INTERPRET=1 "$python" -m pytest -n 2 --dist worksteal tests/kernels "$@"
