#!/bin/bash
# train.py on 4 ranks: 2 nodes x 2.
# Made by `ddpilot slurm`, and needs ddpilot on the nodes: sbatch submits it.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=slurm-%j.out
#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --open-mode=append

set -e -o pipefail

# A task of an array is ARRAY_TASK: its SLURM_JOB_ID alone may name the whole array.
job="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
# The output of all starts is in one file.
[ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || echo "job $job starts again on $SLURM_JOB_NODELIST" >&2

# All ranks meet at the first node; the port comes from the job's number, so that jobs on one node do not collide.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# Where a Loop or Trainer notes the update and the error if it fails.
export DDPILOT_FAILURE_FILE="$PWD/slurm-$SLURM_JOB_ID.failure"

# One `ddpilot run` per node, which starts the ranks of its node. If one fails, srun ends all of them.
status=0
# shellcheck disable=SC2016 # what is in quotes is for the shell of each task
srun --kill-on-bad-exit=1 --label bash -c '
  export PET_NODE_RANK="$SLURM_NODEID"  # read as --node-rank
  trap : USR1 TERM  # Slurm signals this shell too; its child saves a checkpoint and exits with 75
  "$@" && exit
  status=$?
  [ "$status" -ne 75 ] || sleep 5  # the others have saved too: let them exit before srun ends the step
  exit "$status"' task \
  python -m ddpilot run --nproc-per-node=2 --nnodes=2 --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
  train.py --epochs 90 --name "it's" --glob '*.pt' || status=$?

# 75: the ranks have saved and want to go on. If a rank failed and noted update and error, the job is tried
# once more, but not if it failed there with the same error before.
if [ "$status" -ne 0 ] && [ "$status" -ne 75 ]; then
  [ -s "$DDPILOT_FAILURE_FILE" ] || exit "$status"
  if grep -qsFxf "$DDPILOT_FAILURE_FILE" "$DDPILOT_FAILURE_FILE.before"; then
    echo "not requeued: the same error came at the same update twice: $(head -n 1 "$DDPILOT_FAILURE_FILE")" >&2
    exit "$status"
  fi
  cat "$DDPILOT_FAILURE_FILE" >>"$DDPILOT_FAILURE_FILE.before"
  rm "$DDPILOT_FAILURE_FILE"
fi
if [ "$status" -ne 0 ]; then
  echo "exit code $status: job $job is requeued" >&2
  scontrol requeue "$job"  # which also ends this script
  sleep 60
fi
