#!/bin/bash
# train.py on 4 ranks: 2 nodes x 2.
# Made by `ddpilot slurm`, and needs ddpilot on the nodes: sbatch submits it.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=slurm-%j.out

set -e -o pipefail

# All ranks meet at the first node; the port comes from the job's number, so that jobs on one node do not collide.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# One `ddpilot run` per node, which starts the ranks of its node. If one fails, srun ends all of them.
# shellcheck disable=SC2016 # what is in quotes is for the shell of each task
srun --kill-on-bad-exit=1 --label bash -c '
  export PET_NODE_RANK="$SLURM_NODEID"  # read as --node-rank
  exec "$@"' task \
  /opt/py/bin/python3 -m ddpilot run --nproc-per-node=2 --nnodes=2 --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
  train.py --epochs 90 --name "it's" --glob '*.pt'
