#!/bin/bash
# train.py on 4 ranks: 2 nodes x 2.
# Made by `ddpilot slurm`, and needs no ddpilot command on the nodes: sbatch submits it.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=60
#SBATCH --gpus-per-node=2
#SBATCH --output=slurm-%j.out
#SBATCH --signal=USR1@120
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

# One task per rank, whose number is in front of its lines. If a rank fails, srun ends all of them.
status=0
# shellcheck disable=SC2016 # what is in quotes is for the shell of each task
srun --kill-on-bad-exit=1 --label bash -c '
  # gloo takes the interface of the host name, which on many nodes is loopback: take the one of the default route.
  while read -r name to _; do
    [ "$to" != 00000000 ] || export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$name}"
  done </proc/net/route
  export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID"
  export LOCAL_WORLD_SIZE="${SLURM_STEP_TASKS_PER_NODE%%[!0-9]*}" GROUP_RANK="$SLURM_NODEID"
  export GROUP_WORLD_SIZE="$SLURM_STEP_NUM_NODES"
  trap : USR1 TERM  # Slurm signals this shell too; its child saves a checkpoint and exits with 75
  "$@" && exit
  status=$?
  [ "$status" -ne 75 ] || sleep 5  # the others have saved too: let them exit before srun ends the step
  exit "$status"' task \
  python -u train.py --epochs 90 --name "it's" --glob '*.pt' || status=$?

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
