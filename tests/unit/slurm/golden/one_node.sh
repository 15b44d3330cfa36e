#!/bin/bash
# train.py on 4 ranks: 1 node x 4.
# Made by `ddpilot slurm`, and needs no ddpilot command on the nodes: sbatch submits it.
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=2:00:00
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=12
#SBATCH --account=proj
#SBATCH --output=slurm-%j.out

set -e -o pipefail

# srun does not take over the number of cores from sbatch.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
# 3 cores for each rank: as many threads, and workers of a DataLoader whose script reads NUM_WORKERS.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-3}" NUM_WORKERS="${NUM_WORKERS:-2}"

# One torchrun per node, which starts the ranks of its node. If one fails, srun ends all of them.
srun --kill-on-bad-exit=1 \
  torchrun --nproc-per-node=4 --standalone \
  train.py --epochs 90 --name "it's" --glob '*.pt'
