#!/usr/bin/env bash
# Set up trainkit if needed, then train: one process for each GPU of this host, or one on the CPU.
#
#   bash train.sh                                                      the quickstart
#   bash train.sh --config configs/qwen2-0.5b-full.yaml --deepspeed --replace_kernel
#
#   bash train.sh --max-restarts 3 --config ...                        a process that dies is started again
#
# NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and NPROC_PER_NODE are honoured on several hosts, and what
# srun says; see trainkit launch --help.
# TRAINKIT_PYTHON=PYTHON uses that interpreter as it is and installs nothing.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/install.sh
source "$repository/scripts/install.sh"
install_trainkit tracking

if [ $# -eq 0 ]; then
  cd "$repository"
  [ -e quickstart/model/config.json ] || "$python" -m trainkit.quickstart
  set -- --config configs/quickstart.yaml
fi

# Not `-m trainkit`, for which a trainkit.py of the user's folder would be trainkit.
exec "$python" "$repository/trainkit/started/module.py" trainkit launch "$@"
