#!/bin/bash
# own: 1 node(s) x 2 rank(s), site local. Made by slurmddp 0.0.0.
# Started as: bash job.sh RUN_FOLDER
# job.sh passes signals on to the supervisor (slurmddp/supervisor in RUN_FOLDER/code/slurmddp.zip), and waits for it.
# That starts the ranks (Slurm: srun --nodes=N --ntasks=N --ntasks-per-node=1 node.sh), and restarts them after a fault.

set -uo pipefail # no -e: a failing command must not skip the end of this script
run=${1:?usage: job.sh RUN_FOLDER}
program=(bash "$run/code/python.sh" /opt/bin/python3 "$run/code/slurmddp.zip") # this Python, for nodes that have none in /usr

# --- values of this job. "yes" or nothing, if the comment ends with a question mark; one that is not here is empty
values=(
  scheduler=local pid=$$ node_folder=/tmp # slurm, or local: this machine, without Slurm; scratch, on each node's own disk
  nodes_max=1 nodes_min=1 elastic= # nodes that train, further ones are spares; minimum nodes of an attempt; may the job lose nodes and continue in its allocation?
  requeue_policy=none guarded= singleton= # requeue: scontrol requeue; chain: sbatch of this file again; none. Does a guard requeue the job if something kills this script? One job of this name at a time?
  own_script=yes must_save= from_zero=2 # is it the user's own training script? Is the job requeued at its time limit only if something was saved in it? Starts from step 1 again after faults that it may make
  breaker=3 max_gpu_hours= gpus_per_node=0 # starts in a row without progress after which the run fails; GPU hours of all starts after which it stops
  preflight= measure= join_timeout=600 # are the nodes checked, and their network measured, before the ranks start? preflight=only: then the job exits. Maximum seconds for that
  stop_lead= cancel_grace=120 # seconds before the time limit at which the ranks save; and from `slurmddp cancel` to SIGTERM, for an own script; empty: never
)
step_options=(--overlap) rank_options=() # options of the ranks' srun, in addition to --nodes and --ntasks; further ones, for launch.mode srun

# --- the epilogue always runs: it sends the last alert if the supervisor has not, and exits with the right code
folder="" child="" over="" why="job.sh ended before its supervisor" # folder: where the supervisor leaves `told`, and its exit code
epilogue() {
  trap '' TERM INT USR2
  [[ -n "$over" || -e "$folder/told" ]] || tell
  read -r code 2>/dev/null <"$folder/finished" || code=${over:-1}
  [[ -z "$folder" ]] || rm -rf "$folder"
  exit "$code"
}
tell() { # without Python: with what submit has prepared beside the addresses. curl reads an address from its standard input
  local secrets=${XDG_CONFIG_HOME:-${HOME:-}/.config}/slurmddp/secrets/${run##*/} last url text
  printf 'job.sh: %s\n' "$why" >&2
  timeout 10 test -O "$run" && timeout 60 "${program[@]}" alert "$run" failed failed "$why" "not restarted automatically" && return
  for last in "$secrets"/.last.*; do
    { read -r url <"$secrets/${last##*/.last.}" && text=$(<"$last"); } 2>/dev/null || continue
    printf 'url = "%s"\n%s\n' "$url" "${text//@now@/$(date +%s)}" |
      curl --disable --config - --silent --show-error --globoff --max-time 20 --output /dev/null
  done
}
fail() { why=$1; exit 1; }
trap epilogue EXIT
folder=$(mktemp -d -p /tmp) || folder=$(mktemp -d -p /dev/shm) || fail "cannot create a folder on the disk of ${HOSTNAME:-this node}"
pass_on() { echo "$1" >>"$folder/signals"; [[ ! -e "$folder/ready" ]] || kill "-$1" "$child" 2>/dev/null; }
trap 'pass_on TERM' TERM; trap 'pass_on INT' INT # noted, and passed on once the supervisor can take it
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || fail "bash $BASH_VERSION on ${HOSTNAME:-this node} is too old: 4.4 or newer is needed"
timeout 60 test -O "$run" -a -r "${program[1]}" -a -r "${program[3]}" || fail "the run's copy of the code is gone, $run/code: was the file system purged, does it not answer, or has another user replaced the run folder? Submit again with --resume ${run##*/}"

# --- the supervisor, which ignores signals until its own handlers are there
(trap '' TERM INT USR2; exec "${program[@]}" job "$run" "$folder" "python=${program[2]}" "${values[@]}" -- "${step_options[@]}" -- "${rank_options[@]}") & child=$!
while kill -0 "$child" 2>/dev/null; do wait "$child"; done
wait "$child"; code=$?; [[ "$code" != 0 ]] || over=0 # also where the node's disk was full
[[ -z "$over" && ! -s "$folder/finished" ]] || exit
case $code in
  96) fail "no Python 3.6 or newer on ${HOSTNAME:-this node}, neither /usr/bin/python3 nor ${program[2]}" ;;
  97) fail "the run's copy of the code is incomplete, $run/code: was the file system purged? Submit again with --resume ${run##*/}" ;;
  98) fail "the run folder does not answer, or cannot be written" ;;
  *) [[ ! -e "$folder/guard" ]] || kill -KILL $$ # the guard brings the job back, as if this script had been killed
    why="the supervisor was killed (exit code $code)" ;;
esac
