#!/usr/bin/env bash
# One program on several hosts: the same line on each of them, within a few minutes.
#   HOSTS=2 HEAD=node0 scripts/launch/torchrun.sh scripts/train.py --full --zero 3 --out /shared/tuned
# HOSTS  how many hosts                       HEAD  name or address of one of them, which all reach
# GPUS   processes on this host (all GPUs)    PORT  of the meeting (29500)    JOB  a name that is the same on all (bmlab)
set -euo pipefail
: "${HOSTS:?how many hosts? HOSTS=2}" "${HEAD:?which host do all meet at? HEAD=node0}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
exec "${PYTHON:-python}" -m torch.distributed.run --nnodes "$HOSTS" --nproc-per-node "${GPUS:-gpu}" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" --rdzv-id "${JOB:-bmlab}" "$@"
