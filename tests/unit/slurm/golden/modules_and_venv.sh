#!/bin/bash
# train.py on 1 rank: 1 node x 1.
# Made by `ddpilot slurm`, and needs no ddpilot command on the nodes: sbatch submits it.
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --mem=8G
#SBATCH --output=slurm-%j.out

set -e -o pipefail

module load python/3.11 cuda/12.4
export VIRTUAL_ENV='/shared/my env'
export PATH="$VIRTUAL_ENV/bin:$PATH"
[ -x "$VIRTUAL_ENV/bin/python" ] || { echo "no Python in $VIRTUAL_ENV on $(hostname)" >&2; exit 1; }

# All ranks meet at the first node; the port comes from the job's number, so that jobs on one node do not collide.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# One task per rank. If a rank fails, srun ends all of them.
# shellcheck disable=SC2016 # what is in quotes is for the shell of each task
srun --kill-on-bad-exit=1 bash -c '
  export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID"
  export LOCAL_WORLD_SIZE="${SLURM_STEP_TASKS_PER_NODE%%[!0-9]*}" GROUP_RANK="$SLURM_NODEID"
  export GROUP_WORLD_SIZE="$SLURM_STEP_NUM_NODES"
  exec "$@"' task \
  python -u train.py --epochs 90 --name "it's" --glob '*.pt'
