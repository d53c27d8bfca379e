#!/bin/bash
# own: 1 node(s) x 2 rank(s), site local. Made by slurmddp 0.0.0.
#
# Started as: bash job.sh RUN_FOLDER
#
# It starts the ranks (node.sh on each node), watches them, and restarts them after a fault. This file contains the values
# of this job. The functions are the same for every job: RUN_FOLDER/code/slurmddp/shell (supervisor.sh).

# No `set -e`: a failing command must not skip the record of how the job ended.
set -uo pipefail
run=${1:?usage: job.sh RUN_FOLDER}
shell=$run/code/slurmddp/shell

# --- values of this job. "yes" or empty, if the comment ends with a question mark
scheduler=local # slurm, or local: this machine, without Slurm
nodes_max=1 # nodes that train; further nodes of the job are spares
nodes_min=1 # minimum nodes of an attempt
elastic= # may the job lose nodes and continue in its allocation?
guarded= # does guard.sh requeue the job if something kills this script?
requeue_policy=none must_save='' # requeue: scontrol requeue; chain: sbatch of this file again; none. Only if something was saved in this job, at the time limit?
breaker=3 # starts in a row without progress after which the run fails
preflight='' measure='' # are the nodes checked, and their network measured, before the ranks start? only: then the job exits
join_timeout=600 # maximum seconds for that check
stop_lead='' cancel_grace=120 # seconds before the time limit at which the ranks save; and from `slurmddp cancel` to SIGTERM, for an own script; empty: never
own_script=yes # is it the user's own training script?
counts_gpus= # do nodes differ in their GPUs, so that the job counts them?
node_folder=/tmp # scratch, on each node's own disk
step_options=(--overlap) # options of the ranks' srun, in addition to --nodes and --ntasks

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
open_attempt
trap ended EXIT
run_job
finish
