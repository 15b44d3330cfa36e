#!/bin/bash
# train.py on 2 ranks: 1 node x 2.
# Made by `ddpilot slurm`, and needs no ddpilot command on the nodes: sbatch submits it.
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --output=slurm-%j.out

set -e -o pipefail

# One torchrun per node, which starts the ranks of its node. If one fails, srun ends all of them.
srun --kill-on-bad-exit=1 --container-image='nvcr.io#nvidia/pytorch:25.01-py3' \
  torchrun --nproc-per-node=2 --standalone \
  train.py --epochs 90 --name "it's" --glob '*.pt'
