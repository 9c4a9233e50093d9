#!/usr/bin/env bash
# One program on the hosts of a Slurm job, submitted from the root of the repository:
#   sbatch --nodes 4 scripts/launch/slurm.sh scripts/train.py --full --zero 3 --out /shared/tuned
# One task a host; torchrun starts a process for each of its GPUs. What stands here, the line of sbatch overrides.
#SBATCH --job-name=bmlab
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export HOSTS=${#hosts[@]} HEAD=${hosts[0]} PORT=$((20000 + SLURM_JOB_ID % 10000)) JOB=$SLURM_JOB_ID GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-gpu}}
srun --kill-on-bad-exit=1 "$SLURM_SUBMIT_DIR/scripts/launch/torchrun.sh" "$@"
