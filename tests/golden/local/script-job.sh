#!/bin/bash
# own: 1 node(s) x 2 rank(s), site local. Made by slurmddp 0.0.0.
#
# Started as: bash job.sh RUN_FOLDER
#
# It starts the ranks, looks after them, and starts them again after a fault: the last lines say in which order.

# No `set -e`: a failing command must not skip the record of how the job ended.
set -uo pipefail

run=${1:?usage: job.sh RUN_FOLDER}
host=$HOSTNAME
job_id=local-$$

# An earlier job was asked to stop, not this one. A rename: whatever moment `slurmddp cancel` chooses, its file is read.
stop=
if mv "$run/stop" "$run/.stop" 2>/dev/null; then
  read -r stop <"$run/.stop"
  [[ "$stop" != "cancelled by the user" ]] || mv -n "$run/.stop" "$run/stop"
  rm -f "$run/.stop"
fi

# --- what is told: lines in job.log, events for programs, alerts for people
say() { printf '%(%F %T)T job.sh: %s\n' -1 "$*"; }

# One line of JSON in events.jsonl. Usage: event NAME '"key": value, ...'; `node` is this one, if no other is named
event() {
  local facts=$2 end=
  [[ "$facts" == *'"node": '* ]] || facts="\"node\": \"$host\", $facts"
  # A line that a full disk has cut, or the end of a rank, must not take this one with it
  [[ -z "$(tail -c 1 "$run/events.jsonl" 2>/dev/null)" ]] || end=$'\n'
  printf '%s{"time": %s, "event": "%s", "attempt": %d, "job_id": "%s", %s}\n' "$end" \
    "$(date +%s.%3N)" "$1" "$attempt" "$job_id" "$facts" >>"$run/events.jsonl"
}

# A text as JSON's. Control characters and broken bytes are gone by then: see `plain`.
json() {
  local text=${1//\\/\\\\}
  printf '"%s"' "${text//\"/\\\"}"
}

# One line of valid UTF-8, for the first line of any bytes
plain() { head -n 1 | head -c 400 | tr -d '\000-\037\177' | iconv -c -f UTF-8 -t UTF-8; }

alert() { :; }
settle_alerts() { :; }

# --- an attempt: one start of torchrun on all nodes. It has a number and logs of its own, and nothing is written twice:
# its number is the first whose folder is not there, so a job that was requeued goes on counting.
attempt=0
open_attempt() {
  while
    printf -v logs '%s/logs/attempt-%03d' "$run" "$attempt"
    ! mkdir "$logs" 2>/dev/null
  do
    [[ -d "$logs" ]] || { echo "job.sh: cannot make the folder $logs" >&2; exit 1; }
    attempt=$((attempt + 1))
  done
  mkdir -p "$logs/flight_recorder" "$logs/preflight" "$logs/sweep"
  printf -v SLURMDDP_STARTED "%(%s)T" -1
  export SLURMDDP_STARTED
  export SLURMDDP_RUN=$run
  export SLURMDDP_JOB_ID=$job_id
  export SLURMDDP_ATTEMPT=$attempt
  export SLURMDDP_LOGS=$logs
  export SLURMDDP_RENDEZVOUS_ID="${run##*/}-$job_id-$attempt" # two jobs with one id would silently merge
}

# Above Linux's ephemeral ports; from job, run and attempt, so that those side by side differ; probed, since others may
# listen.
# Usage: choose_port HEAD_NODE
choose_port() {
  local seed tries
  seed=$(printf '%s %s %s' "$job_id" "$run" "$attempt" | cksum | cut -d' ' -f1)
  port=$((61000 + seed % 4500))
  for ((tries = 0; tries < 20; tries++)); do
    timeout 2 bash -c "exec 3<>/dev/tcp/$1/$port" 2>/dev/null || break
    port=$((61000 + (port - 60999) % 4500))
  done
  export SLURMDDP_PORT=$port
}

# --- signals: they say how the job ends, and the record of it is written however it does
child=        # what runs on the nodes now
ending=       # why the job is ended from outside: cancelled, time limit, preemption, node failure, requeued
back=         # whether it comes back after that
signal=
slurm_state=
slurm_reason=

# The ranks see the file, save and exit. The first reason stays: -C keeps one that a cancel writes in this moment.
# Usage: ask_to_stop REASON
ask_to_stop() {
  [[ ! -e "$run/stop" ]] || return 0
  say "asking the ranks to save a checkpoint, then exit (stop file): $1"
  (set -C && printf '%s\n' "$1" >"$run/stop")
  [[ "$1" == SIG* ]] || alert stopping stopping "$1" "ranks save a checkpoint, then exit"
}

# True where nothing may start on the nodes any more
must_end() { [[ -n "$ending" || -e "$run/stop" ]]; }

# The last word of a job that is not to go on. Usage: stopped_for_good WHY
stopped_for_good() { alert stopping stopped "$1" "nothing restarts it; slurmddp submit --resume goes on"; }

terminated() {
  signal=$1
  export SLURMDDP_ALERT_BUDGET=4 # seconds: what Slurm's KillWait leaves, at the least
  slurm_state=CANCELLED
  ending=cancelled
  say "SIG$signal: $ending"
  ask_to_stop "SIG$signal"
  [[ -z "$child" ]] || kill -TERM "$child" 2>/dev/null
  # Slurm waits for some seconds only (KillWait): what brings the job back has to be done at once, and what is told.
  case "$ending" in
    cancelled) ;;
    requeued) ! was_requeued "Slurm or an operator has requeued the job" || back=yes ;;
    *) ! requeue "$ending" || back=yes ;;
  esac
  [[ -n "$back" ]] || stopped_for_good "$ending (SIG$signal)"
}

trap 'terminated TERM' TERM
trap 'terminated INT' INT

# Wait for the child, and look around meanwhile. Returns the child's exit code. bash runs a trap between two commands
# only, so nothing here takes long.
wait_for_child() {
  local nap
  while kill -0 "$child" 2>/dev/null; do
    look_around
    sleep 2 >/dev/null 2>&1 &
    nap=$!
    wait -n "$child" "$nap"
    kill "$nap" 2>/dev/null
    wait "$nap" 2>/dev/null # without a word about its end
  done
  wait "$child"
}

# --- what is looked at every 2 s, while anything runs on the nodes
starts=0       # of the ranks, in this job
noted=         # what the ranks of the newest start said of their end: RANK NODE TEXT
recovering=    # why the ranks had to start again; empty once they train
longest_save=0
longest_start=0 # seconds from the launch of an attempt, or from a failure in it, to the ranks' start

new_attempt() {
  noted=
  marker_seen=
  starting_since=$SECONDS # the launch, or the failure
  start_failed=           # whether the ranks of this attempt have failed, and did not start again yet
  agents_waiting=0        # nodes whose agents have stopped their ranks since then
  abandoned=              # why this script has ended the attempt
  uncounted=0             # starts that failed and that the breaker has not counted
  counted=0               # those that it has
  restarts_then=0         # restarts in place when it counted the newest
  look_again=0
}

look_around() {
  printf -v now "%(%s)T" -1
  printf "%s\n" "$now" >"$run/heartbeat" # guard.sh looks at it
  read_events
  expect_restart
  count_starts
  # A marker says that this attempt is over: ranks that do not see it (a script that waits for a rank 0 that has ended)
  # are ended.
  if [[ -z "$marker_seen" && -e "$(marker)" ]]; then
    marker_seen=$SECONDS
  elif [[ -n "$marker_seen" ]] && ((SECONDS - marker_seen > 45)); then
    say "the attempt is over, and its processes are still there: ending them"
    marker_seen=$SECONDS
    kill -TERM "$child" 2>/dev/null
  fi
}

# End an attempt that leads nowhere: torchrun itself would go on for long. Usage: abandon WHY
abandon() {
  abandoned=${abandoned:-$1}
  say "ending the attempt: $1"
  kill -TERM "$child" 2>/dev/null
}

# After a failure, the ranks start again, or their agents do not find each other: where nodes have lost sight of each
# other, agents wait for minutes. The next attempt begins with a check of the nodes.
expect_restart() {
  local bound=$((longest_start + 5)) # a first start takes longer: with containers, agents and cold caches
  # A script may save after a SIGTERM: torchrun waits 30 s for each node's ranks before it kills them.
  ((agents_waiting >= ${#chosen[@]})) || bound=$((bound + 30))
  [[ -n "$start_failed" && ! -e "$(marker)" ]] && ((starts > 0 && SECONDS - starting_since > bound)) || return 0
  abandon "the ranks did not start again within $bound s"
  starting_since=$SECONDS # again, if it is still there then
}

# Starts that fail before our own program runs, such as one whose code is gone, are not in the breaker's list. torchrun
# makes a folder for each start of a node's ranks: attempt_0, attempt_1, ...
count_starts() {
  local lines=0
  ((SECONDS >= look_again)) || return 0
  look_again=$((SECONDS + 10)) # there may be many nodes
  [[ ! -e "$run/failures" ]] || lines=$(grep -c "^$attempt " "$run/failures")
  while (cd "$logs" && compgen -G "torchrun/*/*/attempt_$((restarts_then + uncounted + 1))" >/dev/null); do
    uncounted=$((uncounted + 1))
  done
  if ((lines != counted)); then
    counted=$lines
    restarts_then=$((restarts_then + uncounted))
    uncounted=0
  elif ((uncounted > 1)) && [[ -z "$abandoned" && ! -e "$(marker)" ]]; then # The newest may be counted in a moment.
    abandon "$uncounted starts failed, the last ones before slurmddp's program began"
  fi
}

# The events that ranks wrote since last time
read_events() {
  local line
  while IFS= read -r line <&"$events"; do
    case "$line" in
      *'"event": "rank_started"'*)
        starts=$((starts + 1))
        ((SECONDS - starting_since <= longest_start)) || longest_start=$((SECONDS - starting_since))
        start_failed=
        agents_waiting=0
        ((starts == 1)) || recovering=${recovering:-$(best_cause "$noted")}
        noted=
        ;;
      *'"event": "error"'* | *'"event": "hang"'*)
        [[ -n "$start_failed" ]] || starting_since=$SECONDS
        start_failed=yes
        note "$line"
        ;;
      *'"event": "ranks_stopped"'*) # by the agent of each node; of ranks that are killed, nobody else tells
        agents_waiting=$((agents_waiting + 1))
        [[ -n "$start_failed" ]] && ((agents_waiting != ${#chosen[@]})) || starting_since=$SECONDS
        start_failed=yes
        ;;
      *'"event": "checkpoint_saved"'*)
        [[ ! "$line" =~ \"seconds\":\ ([0-9]+) ]] || ((BASH_REMATCH[1] <= longest_save)) || longest_save=${BASH_REMATCH[1]}
        ;;
      *'"event": "first_step"'*)
        if [[ -n "$recovering" ]]; then
          alert recovered running "$(cause_text "$recovering")" "training goes on"
          recovering=
        fi
        ;;
    esac
  done
}

# The first error of a start is the cause, and a lost connection is what others see of it. Usage: note EVENT_LINE
note() {
  local rank=- node=- text=error
  if [[ "$1" == *'"event": "hang"'* ]]; then
    [[ ! "$1" =~ \"ranks\":\ \[([0-9]+) ]] || rank=${BASH_REMATCH[1]}
    [[ ! "$1" =~ \"nodes\":\ \[\"([^\"]+) ]] || node=${BASH_REMATCH[1]}
    [[ ! "$1" =~ \"waited\":\ ([0-9]+) ]] || text="hang: no progress for ${BASH_REMATCH[1]} s"
    [[ -n "$noted" ]] || alert hang running "$(cause_text "$rank $node $text")" "the ranks start again"
  else
    [[ ! "$1" =~ \"rank\":\ ([0-9]+) ]] || rank=${BASH_REMATCH[1]}
    [[ ! "$1" =~ \"node\":\ \"([^\"]+) ]] || node=${BASH_REMATCH[1]}
    [[ ! "$1" =~ \"message\":\ \"(([^\"\\]|\\.)*)\" ]] || text=${BASH_REMATCH[1]%%\\n*}
    [[ ! "$1" =~ \"kind\":\ \"([A-Za-z_]+) ]] || text="${BASH_REMATCH[1]}: ${text//\\\"/\"}"
  fi
  [[ -n "$noted" && ! "$noted" =~ $consequence ]] || noted=$(plain <<<"$rank $node $text")
}

# --- why an attempt failed: RANK NODE TEXT, with a dash for what nobody knows
cause_text() { # as people read it
  local rank node text
  read -r rank node text <<<"$1"
  [[ "$node" == - ]] || text="$node: $text"
  [[ "$rank" == - ]] || text="rank $rank on $text"
  printf '%s\n' "$text"
}

# What ranks see of another one that has gone
consequence='Connection (closed|reset)|Broken pipe|remote process exited|DistNetworkError|PeerError|ncclRemoteError|Rendezvous[A-Za-z]*Error'

# What node.sh and the preflight say where the user has to correct something: on another node it would be the same
user_error='^(setup line (failed|exited)|container\.python: |no torch in )'

# What the ranks said, unless it is only what they saw of another one. Usage: best_cause NOTED
best_cause() {
  local found=$1
  if [[ -z "$found" || "$found" =~ $consequence ]]; then
    found=$(cause_in_logs)
  fi
  [[ -n "$found" ]] || found=${1:-- - unknown}
  printf '%s\n' "$found"
}

# What the nodes' logs say: an exception (PyTorch writes the rank before each line), a node that could not begin, ranks
# that a signal ended, of which torchrun tells; and srun, of agents that one ended. RUN/ranks: the node of each rank.
cause_in_logs() {
  local path logged=()
  [[ -e "$run/ranks" ]] || : >"$run/ranks"
  for path in "$logs"/*.log "$logs/srun.err"; do
    [[ ! -e "$path" ]] || logged+=("$path") # mawk stops at a file that is not there
  done
  awk '
    function keep(place, rank, node, text) { if (!(place in best)) best[place] = rank " " node " " text }
    function by_signal(number) { return number == 9 ? "killed by SIGKILL (out of memory?)" : "killed by signal " number }
    function ended_by_others(number) { return number == 15 || number == 6 || number == 2 }
    function value(text) { gsub(/[^-0-9]/, "", text); return text + 0 }
    FILENAME == ARGV[1] { rank_of[$1, count[$1]++] = FNR - 1; next }
    FNR == 1 { node = FILENAME; sub(".*/", "", node); sub("[.]log$", "", node); root = ending = 0 }
    node == "srun.err" {
      split($0, part, ": ") # srun: error: node3: task 2: Killed
      if (part[4] ~ /^task/ && part[5] != "Terminated" && part[5] !~ /^Exited/) keep(2, "-", part[3], "the torchrun agent: " part[5])
      next
    }
    /^[^ ]*python[0-9.]*: (No module named|Error while finding module|can.t open file)/ { # it could not even begin
      sub(/^[^ ]*: /, "")
      keep(0, "-", node, "the ranks could not start: " $0)
      next
    }
    /^slurmddp: node [^ ]+: / { sub(/^slurmddp: node [^ ]+: /, ""); keep(1, "-", node, $0); next }
    /^(\[rank[0-9]+\]: )?[A-Za-z_][A-Za-z_0-9.]*(Error|Exception|Interrupt)/ {
      if (/SignalException/) ending = 1 # the agent got a signal: what it raises after that is a consequence
      if (ending || /ChildFailedError|'"$consequence"'/) next
      rank = "-"
      if (match($0, /^\[rank[0-9]+\]: /)) { rank = value(substr($0, 1, RLENGTH)); $0 = substr($0, RLENGTH + 1) }
      keep(1, rank, node, $0)
      next
    }
    /failed \(exitcode: -[0-9]+\) local_rank: [0-9]+/ { # a start that failed; the time stands in front
      code = -value(substr($0, index($0, "exitcode:"), 14))
      who = value(substr($0, index($0, "local_rank:"), 15))
      if (!ended_by_others(code) && $1 $2 > newest) {
        newest = $1 $2
        rank = (node, who) in rank_of ? rank_of[node, who] : "-"
        best[3] = rank " " node " " (rank == "-" ? "local rank " who ": " : "") by_signal(code)
      }
    }
    /^Root Cause/ { root = 1 }
    root && /^ *rank +:/ { rank = $3 }
    root && /^ *exitcode +:/ {
      root = 0
      if ($3 > 0) keep(4, rank, node, "ended with exit code " $3)
      else if (!ended_by_others(-$3)) best[3] = rank " " node " " by_signal(-$3)
    }
    END { for (place = 0; place <= 4; place++) if (place in best) { print best[place]; exit } }
  ' "$run/ranks" "${logged[@]}" | plain
}

# --- what runs on the nodes: one process a node, started all at once
bound=()   # timeout and its words, for what must not hang
chosen=("$host")

# Usage: on_nodes LOG COMMAND...; in the background, since bash runs a trap only between commands
on_nodes() {
  local log=$1
  shift
  export SLURMDDP_NODES=1
  "${bound[@]}" "$@" >>"${log//%N/$host}" 2>&1 </dev/null &
  child=$!
  [[ -z "$ending" ]] || kill -TERM "$child" 2>/dev/null # the signal came before there was a child
  wait_for_child
}

train() {
  local code
  bound=()
  on_nodes "$logs/%N.log" bash "$run/node.sh"
  code=$?
  child=
  return "$code"
}

# What an attempt has left on its nodes: processes, shared memory, scratch
sweep() {
  local left
  bound=(timeout --kill-after=5 20)
  SLURMDDP_SWEEP=$SLURMDDP_RENDEZVOUS_ID on_nodes "$logs/sweep.out" bash "$run/sweep.sh"
  child=
  left=$(awk '{name = FILENAME; sub(".*/", "", name); printf "%s%s %s", (n++ ? "; " : ""), name, $0}' "$logs"/sweep/* 2>/dev/null | plain)
  event cleaned "\"left\": $(json "$left")"
}

# --- back into the queue: the run goes on in a new attempt, on other nodes where these are bad
# This job is not one that could be brought back.
requeue() { return 1; }
was_requeued() { return 1; }

# --- how attempts ended: markers, and the breaker
marker() { printf '%s/markers/attempt-%03d.json' "$run" "$attempt"; }
from_marker() { sed -n 's/^ *"'"$1"'": "\(.*\)",\{0,1\}$/\1/p' "$(marker)" 2>/dev/null | plain; }

# Three files in the run folder make the breaker, see slurmddp/runtime/watch/failures.py. True where the last
# 3 starts failed and none of them got further than the first.
no_progress() {
  local step=0 failed=${uncounted:-1}
  [[ ! -e "$run/progress" ]] || read -r step _ <"$run/progress"
  [[ "$step" =~ ^[0-9]+$ ]] || step=0
  # One more attempt, on nodes that are checked first: a container that has lost its image fails all starts in place.
  ((failed < 3)) || failed=2
  for ((failed = failed < 1 ? 1 : failed; failed > 0; failed--)); do
    printf '%d %d\n' "$attempt" "$step" >>"$run/failures"
  done
  tail -n 3 "$run/failures" |
    awk 'NR == 1 {first = $2} $2 > first {further = 1} END {exit further || NR < 3}'
}

# --- what comes after an attempt
# Sets `decision` (done, stopped, failed, cancelled, requeue, next) and `cause`, RANK NODE TEXT. Usage: decide EXIT_CODE
decide() {
  local state stop=
  state=$(from_marker state)
  if [[ -e "$run/stop" ]]; then
    read -r stop <"$run/stop"
    stop=${stop:-stop file}
  fi
  cause="- - "
  if [[ -n "$ending" ]]; then
    decision=stopped
    [[ "$ending" != cancelled ]] || decision=cancelled
    [[ -z "$back" ]] || decision=requeue
    cause="- - $ending"
  elif [[ "$state" == "done" ]]; then
    decision="done"
  elif [[ "$state" == failed || "$state" == "no progress" ]]; then
    decision=failed
    cause=$(best_cause "$noted")
    if [[ "$cause" == *" unknown" ]]; then
      cause="- - $(from_marker cause)"
    elif [[ "$state" == "no progress" ]]; then
      cause+="; $(from_marker cause)"
    fi
  elif [[ -n "$stop" ]] || [[ "$state" == stopped && -z "$abandoned" ]]; then
    decide_after_stop "$stop"
  elif (($1 == 0)) && [[ -z "$abandoned" ]]; then
    decision="done" # a script of the user's own says it with its exit code
  else
    decide_after_failure
  fi
}

# A run that was stopped for a reason of the cluster's goes on. Usage: decide_after_stop REASON
decide_after_stop() {
  local reason=$1
  decision=stopped
  reason=${reason:-$(from_marker reason)}
  cause="- - $reason"
  if [[ ! -e "$run/stop" ]] && nobody_asked && [[ "$reason" =~ ^SIGTERM\ received\ by\ rank\ ([0-9]+)\ on\ (.+)$ ]]; then
    cause=$(forged)
    cause=${cause:-"${BASH_REMATCH[1]} ${BASH_REMATCH[2]} SIGTERM that neither Slurm nor the user sent (earlyoom, or an administrator?)"}
    decision=next
    break_after_failures
  fi
}

# An agent that met somebody else's messages sends its ranks SIGTERM
forged() {
  awk 'sub(/^slurmddp: node /, "") && sub(/: somebody else /, " somebody else ") {print "-", $0; exit}' "$logs"/*.log
}

# True where a SIGTERM reached some ranks only. Slurm sends it to all of a job or of a step, agents included.
nobody_asked() {
  local told
  told=$(grep -lE 'death signal|got signal: 15' "$logs"/*.log 2>/dev/null | wc -l)
  ((told < 1))
}

# True where node.sh could not start the ranks on any node, for something that the user has to correct. Where others
# could, those nodes are not used any more. Usage: nobody_could_start
nobody_could_start() {
  local node said bad=()
  for node in "${chosen[@]}"; do
    said=$(plain 2>/dev/null <"$logs/preflight/$node.failed")
    [[ "$said" =~ $user_error ]] || continue
    bad+=("$node")
    cause="- $node $said"
  done
  ((${#bad[@]} < ${#chosen[@]})) || return 0
  return 1
}

decide_after_failure() {
  cause=$(best_cause "$noted")
  decision=failed
  ! nobody_could_start || return
  [[ -z "$abandoned" ]] || cause+="; $abandoned"
  decision=next
  break_after_failures
}

# The breaker's decision about an attempt that failed
break_after_failures() {
  no_progress || return 0
  decision=failed
  cause="${cause}; no progress in 3 starts"
  mkdir -p "$run/markers"
  printf '{"state": "no progress", "restart": false, "attempt": %d, "cause": %s}\n' "$attempt" "$(json "$(cause_text "$cause")")" >"$(marker)"
}

# --- one attempt after the other, until one is the last
exit_code=1
decision=failed
cause="- - "
run_attempt() {
  new_attempt
  if must_end; then
    say "asked to stop before the ranks started"
    exit_code=0
    decide 0
    end_attempt
    return
  fi
  choose_port 127.0.0.1
  event attempt_started "\"nodes\": $(json "$host")"
  say "attempt $attempt on $host, logs of the nodes: $logs"
  starting_since=$SECONDS
  train
  exit_code=$?
  read_events
  decide "$exit_code"
  end_attempt
  [[ "$decision" != next ]] || recovering=$cause
  [[ -n "$ending" ]] || sweep
}

end_attempt() {
  local rank node text
  read -r rank node text <<<"$cause"
  event attempt_ended "\"exit_code\": $exit_code, \"cause\": $(json "$text"), \"node\": $(json "${node#-}"), \"rank\": ${rank/-/null}, \"decision\": \"$decision\""
  say "attempt $attempt ended with exit code $exit_code${text:+, $(cause_text "$cause")}: $decision"
}

# What is done about the last attempt's decision, and who is told. Returns the job's exit code.
finish() {
  local why
  export SLURMDDP_ALERT_BUDGET=8 # seconds
  [[ "$decision" != next ]] || decide "$exit_code" # a signal came between two attempts
  why=$(cause_text "$cause")
  if [[ "$decision" == requeue && -z "$ending" ]] && ! requeue "$why"; then
    decision=failed
  fi
  case "$decision" in
    done) alert finished "done" "" "" ;;
    failed) alert failed failed "$why" "nothing restarts it" ;;
    stopped | cancelled) [[ -n "$ending" ]] || stopped_for_good "$why" ;; # else it was told at once
  esac
  [[ "$decision" != failed ]] || ((exit_code > 0)) || exit_code=1
  [[ "$decision" != "done" ]] || exit_code=0
  settle_alerts 8
  return "$exit_code"
}

# --- the job
ended() {
  event job_ended "\"exit_code\": $exit_code, \"signal\": \"$signal\", \"slurm_state\": \"$slurm_state\", \"slurm_reason\": \"$slurm_reason\", \"decision\": \"$decision\""
  say "ended with exit code $exit_code: $decision"
}

open_attempt
trap ended EXIT
event job_started "\"nodes\": $(json "$host")"
say "job $job_id on $host"
exec {events}<"$run/events.jsonl"
cat <&"$events" >/dev/null # what has happened before this job
case $(awk -F '"event": "' 'split($2, name, "\"") && name[1] ~ /^(job_started|requeued)$/ {last = last " " name[1]} END {print last}' "$run/events.jsonl") in
  " job_started") alert started running "" "" ;;
  *"requeued job_started") ;; # it was said when the job went back into the queue
  *) alert requeued running "its nodes were lost, or taken" "the job has begun again, and resumes" ;;
esac

run_attempt
while [[ "$decision" == next && -z "$ending" ]]; do
  open_attempt
  run_attempt
done
finish
