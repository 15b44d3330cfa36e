#!/bin/bash
# train.py on 8 ranks: 2 nodes x 4.
# Made by `ddpilot slurm`, and needs no ddpilot command on the nodes: sbatch submits it.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --partition=all
#SBATCH --output=slurm-%j.out
#SBATCH --exclusive

set -e -o pipefail

# All ranks meet at the first node; the port comes from the job's number, so that jobs on one node do not collide.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# One torchrun per node, which starts the ranks of its node. If one fails, srun ends all of them.
# shellcheck disable=SC2016 # what is in quotes is for the shell of each task
srun --kill-on-bad-exit=1 --label bash -c '
  # gloo takes the interface of the host name, which on many nodes is loopback: take the one of the default route.
  while read -r name to _; do
    [ "$to" != 00000000 ] || export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$name}"
  done </proc/net/route
  export PET_NODE_RANK="$SLURM_NODEID"  # read as --node-rank
  exec "$@"' task \
  torchrun --nproc-per-node=4 --nnodes=2 --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
  train.py --epochs 90 --name "it's" --glob '*.pt'
