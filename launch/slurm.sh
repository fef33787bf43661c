#!/usr/bin/env bash
# Train on a Slurm cluster, from the repository's folder; arguments go to ./run_train.sh:
#
#   sbatch --nodes=4 --partition=P launch/slurm.sh --config llama3_8b.toml --job.output_dir=/shared/runs/llama
#
# Warned before its time is up or it is preempted, the run writes a checkpoint and exits with 75; the job then
# requeues itself and goes on from there. docs/slurm.md says what to set for a cluster.
#
#SBATCH --job-name=meshloom
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1        # one launcher a node: it starts a process for each GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --mem=0                    # all of a node's
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180        # seconds before the end: longer than a step and a checkpoint
#SBATCH --requeue                  # after a node failure, too
#SBATCH --open-mode=append         # one log through all requeues
#SBATCH --output=%x-%j.log
set -euo pipefail

# Slurm runs a copy of this file, so its own path says nothing: the repository is where sbatch was called.
repository=${MESHLOOM_REPOSITORY:-$SLURM_SUBMIT_DIR}
source "$repository/setup_env.sh" # here, once: not on every node at the same time
meshloom_setup run
export PYTHON

export NNODES=$SLURM_JOB_NUM_NODES
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))} # jobs that share a node must not meet
echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST"

# In the background, for bash runs a trap only once a foreground command has ended. A launcher that ends before the
# others with an error must not have them killed while they save (--kill-on-bad-exit=0), but none may stay (--wait).
# shellcheck disable=SC2016  # the node's own shell is to expand it
srun --ntasks="$NNODES" --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 --wait=60 \
    bash -c 'NODE_RANK=$SLURM_NODEID exec "$0" "$@"' "$repository/run_train.sh" "$@" &
step=$!

# The warning comes to this shell alone (B:). srun passes on what it gets to the launchers on every node.
# shellcheck disable=SC2329  # the traps call it
pass_on() {
    interrupted=yes
    kill -s "$1" "$step" 2>/dev/null || true
}
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM

interrupted=yes
while [ "$interrupted" = yes ]; do # a trap ends `wait` early, with a code that is not the step's
    interrupted=no
    code=0
    wait "$step" || code=$?
done

# 75: stopped by a signal, after a checkpoint. A job that is no longer running was cancelled: it stays so.
if [ "$code" = 75 ] && [[ $(scontrol show job --oneliner "$SLURM_JOB_ID") == *" JobState=RUNNING "* ]]; then
    echo "job $SLURM_JOB_ID: stopped after a checkpoint, goes back to the queue"
    scontrol requeue "$SLURM_JOB_ID" || true # refused after `scontrol update JobId=ID Requeue=0`
fi
exit "$code"
