#!/usr/bin/env bash
# Set up trainkit if needed, then train: one process for each GPU of this host, or one on the CPU.
#
#   bash train.sh                                                      the quickstart
#   bash train.sh --config configs/qwen2-0.5b-full.yaml --deepspeed --replace_kernel
#
# NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and NPROC_PER_NODE are honoured on several hosts.
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

gpus=0
if command -v nvidia-smi >/dev/null; then gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true); fi
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
  gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '[^[:space:]]' || true)
fi
processes=${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}

if [ "$processes" -gt 1 ] || [ "${NNODES:-1}" -gt 1 ]; then
  launcher=("$python" -m torch.distributed.run
    --nnodes "${NNODES:-1}" --node_rank "${NODE_RANK:-0}" --nproc_per_node "$processes"
    --master_addr "${MASTER_ADDR:-127.0.0.1}" --master_port "${MASTER_PORT:-29500}"
    -m trainkit.cli.app)
else
  launcher=("$python" -m trainkit.cli.app)
fi
command=("${launcher[@]}" sft "$@")
printf '+' >&2
printf ' %q' "${command[@]}" >&2
printf '\n' >&2
exec "${command[@]}"
