#!/bin/bash
# train.py on 4 ranks: 4 nodes x 1.
# Made by `ddpilot slurm`, and needs no ddpilot command on the nodes: sbatch submits it.
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --mem-per-cpu=4G
#SBATCH --output=slurm-%j.out

set -e -o pipefail

# All ranks meet at the first node; the port comes from the job's number, so that jobs on one node do not collide.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# srun does not take over the number of cores from sbatch.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
# 1 core for each rank: as many threads, and workers of a DataLoader whose script reads NUM_WORKERS.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" NUM_WORKERS="${NUM_WORKERS:-0}"

# One task per rank, whose number is in front of its lines. If a rank fails, srun ends all of them.
# shellcheck disable=SC2016 # what is in quotes is for the shell of each task
srun --kill-on-bad-exit=1 --label bash -c '
  # gloo takes the interface of the host name, which on many nodes is loopback: take the one of the default route.
  while read -r name to _; do
    [ "$to" != 00000000 ] || export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$name}"
  done </proc/net/route
  export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID"
  export LOCAL_WORLD_SIZE="${SLURM_STEP_TASKS_PER_NODE%%[!0-9]*}" GROUP_RANK="$SLURM_NODEID"
  export GROUP_WORLD_SIZE="$SLURM_STEP_NUM_NODES"
  exec "$@"' task \
  python -u train.py --epochs 90 --name "it's" --glob '*.pt'
