#!/bin/bash
# gpt-books: 2 node(s) x 4 rank(s), site generic. Made by slurmddp 0.0.0.
#
# Submitted as: sbatch --output=RUN_FOLDER/logs/job.log job.sh RUN_FOLDER
#SBATCH --job-name=gpt-books
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=01:00:00
#SBATCH --partition=gpu
#SBATCH --no-requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@120
#
# It starts the ranks (node.sh on each node), watches them, and restarts them after a fault. This file contains the values
# of this job. The functions are the same for every job: RUN_FOLDER/code/slurmddp/shell (supervisor.sh).

# No `set -e`: a failing command must not skip the record of how the job ended.
set -uo pipefail
run=${1:?usage: job.sh RUN_FOLDER}
shell=$run/code/slurmddp/shell

# --- values of this job. "yes" or empty, if the comment ends with a question mark
scheduler=slurm # slurm, or local: this machine, without Slurm
nodes_max=2 # nodes that train; further nodes of the job are spares
nodes_min=2 # minimum nodes of an attempt
elastic= # may the job lose nodes and continue in its allocation?
guarded=yes # does guard.sh requeue the job if something kills this script?
requeue_policy=none must_save='' # requeue: scontrol requeue; chain: sbatch of this file again; none. Only if something was saved in this job, at the time limit?
breaker=3 # starts in a row without progress after which the run fails
preflight=yes measure=yes # are the nodes checked, and their network measured, before the ranks start? only: then the job exits
join_timeout=600 # maximum seconds for that check
stop_lead=120 cancel_grace='' # seconds before the time limit at which the ranks save; and from `slurmddp cancel` to SIGTERM, for an own script; empty: never
own_script= # is it the user's own training script?
counts_gpus= # do nodes differ in their GPUs, so that the job counts them?
node_folder=/tmp # scratch, on each node's own disk
step_options=(--cpus-per-task=32 --overlap) # options of the ranks' srun, in addition to --nodes and --ntasks

# --- the functions
cannot_start() {
  printf 'job.sh: %s\n' "$1" >&2
  [[ ! -O "$run" || ! -r "$run/alert.sh" ]] || bash "$run/alert.sh" failed failed "$1" "not restarted automatically"
  exit 1
}
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || cannot_start "bash $BASH_VERSION on ${HOSTNAME:-this node} is too old: 4.4 or newer is needed"
[[ -O "$run" && -r "$shell/supervisor.sh" ]] || cannot_start "the run's copy of the code is gone, $shell: was the file system purged, or has another user replaced the run folder? Submit again with --resume ${run##*/}"
source "$shell/supervisor.sh"

# --- the job
forget_stop # remove the stop file of an earlier job
trap 'terminated TERM' TERM
trap 'terminated INT' INT
trap warned USR2 # before the time limit and, on some sites, before a preemption
open_attempt
trap ended EXIT
run_job
finish
