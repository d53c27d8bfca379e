#!/bin/bash
# own: 2 node(s) x 8 rank(s), site lumi. Made by slurmddp 0.0.0.
#
# Submitted as: sbatch --output=RUN_FOLDER/logs/job.log job.sh RUN_FOLDER
#SBATCH --job-name=own
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=56
#SBATCH --gpus-per-node=8
#SBATCH --mem=491520M
#SBATCH --time=01:00:00
#SBATCH --partition=standard-g
#SBATCH --account=my_project
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@120
#
# It starts the ranks, looks after them, and starts them again after a fault: the last lines say in which order.

# No `set -e`: a failing command must not skip the record of how the job ended.
set -uo pipefail

run=${1:?usage: job.sh RUN_FOLDER}
host=${SLURMD_NODENAME:-$HOSTNAME} # sbatch and srun hand on HOSTNAME as it was where they were called
job_id=${SLURM_JOB_ID:?this script runs inside a Slurm job}
slurm_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID} # a task's own id is that of the whole array
slurm_job=${slurm_job:-$job_id}

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
restarts=${SLURM_RESTART_COUNT:-0}
preempted_at=
node_list=$SLURM_JOB_NODELIST

# What Slurm says of this job now; where it does not answer, what it said last
ask_slurm() {
  local report began
  report=$(timeout 5 scontrol show job "$slurm_job" -o 2>/dev/null)
  [[ "$report" =~ \ StartTime=([0-9][^ ]*) ]] && began=${BASH_REMATCH[1]}
  [[ ! "$report" =~ JobState=([A-Z_]+) ]] || slurm_state=${BASH_REMATCH[1]}
  [[ ! "$report" =~ Reason=([A-Za-z_]+) ]] || slurm_reason=${BASH_REMATCH[1]}
  [[ ! "$report" =~ \ Restarts=([0-9]+) ]] || restarts=${BASH_REMATCH[1]}
  # Slurm keeps the time of a preemption that was before this start
  [[ ! "$report" =~ \ PreemptTime=([0-9][^ ]*) || "${BASH_REMATCH[1]}" < "${began:-}" ]] || preempted_at=${BASH_REMATCH[1]}
  [[ ! "$report" =~ \ NodeList=([A-Za-z0-9][^ ]*) ]] || node_list=${BASH_REMATCH[1]}
}

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

# USR2 comes ahead of the time limit and, where the site says so, of a preemption.
warned() {
  ask_slurm
  if [[ -z "$preempted_at" ]]; then ask_to_stop "time limit"; else ask_to_stop preemption; fi
}

# The last word of a job that is not to go on. Usage: stopped_for_good WHY
stopped_for_good() { alert stopping stopped "$1" "nothing restarts it; slurmddp submit --resume goes on"; }

terminated() {
  signal=$1
  export SLURMDDP_ALERT_BUDGET=4 # seconds: what Slurm's KillWait leaves, at the least
  # scancel, the time limit, a preemption and a requeue send the same signal; only Slurm knows which of them it was.
  ask_slurm
  if ((restarts > ${SLURM_RESTART_COUNT:-0})); then
    ending=requeued
  elif [[ "$slurm_reason" == TimeLimit ]]; then
    ending="time limit"
  elif [[ -n "$preempted_at" ]]; then
    ending=preemption
  elif [[ "$slurm_state" == NODE_FAIL* || "$slurm_reason" == NodeDown ]]; then
    ending="node failure"
  else
    ending=cancelled
  fi
  say "SIG$signal: $ending (Slurm: $slurm_state, $slurm_reason)"
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
trap warned USR2

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
  watch_clock
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

# The ranks are told in time to save once more, however long that has come to take.
end_time=${SLURM_JOB_END_TIME:-}
watch_clock() {
  local lead=$((2 * longest_save + 30))
  ((lead > 120)) || lead=120
  [[ -n "$end_time" && ! -e "$run/stop" ]] && ((end_time - now < lead)) || return 0
  # An operator may have given the job more time.
  [[ ! "$(timeout 5 scontrol show job "$slurm_job" -o 2>/dev/null)" =~ \ EndTime=([^ ]+) ]] || end_time=$(date -d "${BASH_REMATCH[1]}" +%s)
  ((end_time - now >= lead)) || ask_to_stop "time limit"
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

# --- nodes: those of the allocation that are left, and those of them that train
nodes=()    # that may be used
chosen=()   # that train in this attempt
excluded=() # lost, or found bad: not used again
suspects=() # their agent was killed, or Slurm did not reach them: used again only where too few others are left

# The words that are not in a list, one a line. Usage: without "LIST" WORD...
without() {
  local list=" $1 " word
  shift
  for word in "$@"; do
    [[ "$list" == *" $word "* ]] || printf '%s\n' "$word"
  done
}

# Take nodes out of this run for good. Usage: exclude REASON NODE...
exclude() {
  local reason=$1 node
  shift
  for node in "$@"; do
    excluded+=("$node")
    say "node $node is not used any more: $reason"
    event node_excluded "\"excluded\": $(json "$node"), \"reason\": $(json "$reason")"
  done
  mapfile -t nodes < <(without "${excluded[*]}" "${nodes[@]}")
}

# Slurm itself takes lost nodes out of a job, where the job is one that may lose nodes.
list_nodes() {
  local before=("${nodes[@]}") lost=()
  ask_slurm
  mapfile -t nodes < <(scontrol show hostnames "$node_list")
  mapfile -t lost < <(without "${nodes[*]}" "${before[@]}")
  ((${#lost[@]} == 0)) || exclude "Slurm has lost it" "${lost[@]}"
  mapfile -t nodes < <(without "${excluded[*]}" "${nodes[@]}")
  lost_nodes="${lost[*]}"
}

# Nodes on which srun could start nothing in this attempt, with what it says of each: NODE TEXT, one a line. It ends what
# it has started on the others, so what became of those says nothing.
unreached() {
  sed -n 's/^srun: error: Task launch for [^ ]* failed on node \([^ :]*\): /\1 /p' "$logs/srun.err" 2>/dev/null |
    awk '!seen[$1]++'
}

# The first nodes that nothing speaks against; spares are those that are left over. False where there are too few.
choose_nodes() {
  mapfile -t chosen < <(without "${suspects[*]}" "${nodes[@]}")
  ((${#chosen[@]} >= 2)) || chosen=("${nodes[@]}")
  chosen=("${chosen[@]:0:2}")
  ((${#chosen[@]} >= 2))
}

# --- what runs on the nodes: one process a node, started all at once
bound=()   # timeout and its words, for what must not hang
together=1 # 0: where one node fails, the others go on

# Usage: on_nodes LOG COMMAND...; in the background, since bash runs a trap only between commands
on_nodes() {
  local log=$1
  shift
  export SLURMDDP_NODES=${#chosen[@]}
  "${bound[@]}" srun \
    --nodes="${#chosen[@]}" --ntasks="${#chosen[@]}" --ntasks-per-node=1 --cpus-per-task=56 --cpu-bind=none \
    --overlap \
    --kill-on-bad-exit="$together" --wait=0 --export=ALL --input=none \
    --output="$log" --open-mode=append \
    "$@" 2>>"$logs/srun.err" &
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
  cat "$logs/srun.err" >&2 # for job.log
  return "$code"
}

# What an attempt has left on its nodes: processes, shared memory, scratch
sweep() {
  local left
  mapfile -t chosen < <(without "${excluded[*]}" "${chosen[@]}")
  bound=(timeout --kill-after=5 20)
  SLURMDDP_SWEEP=$SLURMDDP_RENDEZVOUS_ID on_nodes "$logs/sweep.out" bash "$run/sweep.sh"
  child=
  left=$(awk '{name = FILENAME; sub(".*/", "", name); printf "%s%s %s", (n++ ? "; " : ""), name, $0}' "$logs"/sweep/* 2>/dev/null | plain)
  event cleaned "\"left\": $(json "$left")"
}

# --- before the ranks start: can these nodes train? Those that cannot are excluded. False where this attempt is over.
check_nodes() {
  local node line verdict="$logs/preflight/verdict" missed=() bad=() user_errors=0 began=$SECONDS
  chosen=("${nodes[@]}") # spares, too
  ask_nodes
  ! must_end || return 0
  for node in "${chosen[@]}"; do
    line=
    if ((${#missed[@]} > 0)); then
      said_of "$node" <(printf '%s\n' "${missed[@]}")
      [[ -n "$line" ]] || continue # Whether it can train is seen once it is asked without those.
      line="Slurm could not start anything there: $line"
    elif [[ -s "$logs/preflight/$node.failed" ]]; then
      line="bad $(plain <"$logs/preflight/$node.failed")"
    elif [[ -e "$verdict" ]]; then
      said_of "$node" "$verdict"
    elif [[ "$node" != "${chosen[0]}" ]]; then
      continue # The first node should have said it.
    fi
    [[ "$line" != ok* ]] || continue
    bad+=("$node")
    line=${line#bad }
    line=${line:-it did not answer: see $logs/preflight/$node.log}
    ((${#bad[@]} > 1)) || cause="- $node preflight: $line"
    [[ ! "$line" =~ $user_error ]] || ((user_errors += 1))
    exclude "preflight: $line" "$node"
  done
  event preflight "\"seconds\": $((SECONDS - began)), \"bad\": $(json "${bad[*]}")"
  if ((${#bad[@]} == 0)); then
    rm -f "$run/preflight-failed"
    return 0
  fi
  # What all nodes have in common, or what other nodes had before, is not put right by further ones.
  decision=failed
  ((user_errors < ${#chosen[@]})) || return 1
  ((${#chosen[@]} == 1 || ${#bad[@]} < ${#chosen[@]})) || return 1
  if ! choose_nodes; then
    [[ -e "$run/preflight-failed" ]] || decision=requeue
    : >"$run/preflight-failed"
    return 1
  fi
  decision=next
  [[ -e "$verdict" ]] # Without one, the others are not checked yet.
}

# Usage: said_of NODE FILE; the answer, the rest of the first line that begins with the node's name, is in `line`
said_of() { line=$(awk -v node="$1" '$1 == node {sub(/^[^ ]+ /, ""); print; exit}' "$2" | plain); }

# Where srun could not reach a node it is asked once more: its slurmd may just be starting. Sets `missed`.
ask_nodes() {
  local try
  for try in 1 2; do
    choose_port "${chosen[0]}"
    bound=(timeout --kill-after=5 600)
    together=0 SLURMDDP_STEP=preflight SLURMDDP_PREFLIGHT_NODES="${chosen[*]}" \
      on_nodes "$logs/preflight/%N.log" bash "$run/node.sh"
    child=
    mapfile -t missed < <(unreached)
    ((${#missed[@]} > 0 && try == 1)) && ! must_end || return 0
    say "Slurm could not start the preflight on ${missed[0]%% *}: ${missed[0]#* }; once more"
    mv "$logs/srun.err" "$logs/srun.first.err"
    rm -f "$logs"/preflight/*
    sleep 5 &
    child=$!
    wait_for_child
    child=
  done
}

# --- back into the queue: the run goes on in a new attempt, on other nodes where these are bad
is_requeued() { # REASON NEXT_JOB
  say "back in the queue, as job $2: $1"
  event requeued "\"how\": \"requeue\", \"reason\": $(json "$1"), \"next_job\": \"$2\""
  alert requeued requeued "$1" "job $2 waits in the queue, and resumes"
}

# Slurm holds a requeued job back for two minutes. Its owner may end that, but not before the job's last process has
# ended: so a process does it that has left the job. (Where cgroups track processes, it is ended with the others, and the
# next command on the login node does it.) Nodes that are not to be used are kept out of the next start in the same way;
# where that leaves too few, they are not.
release_hold() {
  (
    setsid env -i PATH="$PATH" HOME="$HOME" SLURM_CONF="${SLURM_CONF:-}" bash -s -- \
      "$slurm_job" "${SLURM_RESTART_COUNT:-0}" "${excluded[*]}" "$run/events.jsonl" "$attempt" "$host" >/dev/null 2>&1 <<'END' &
job=$1 restarts=$2 excluded=${3// /,} events=$4 attempt=$5 host=$6
[[ -n "$SLURM_CONF" ]] || unset SLURM_CONF
trap '' TERM INT HUP
told= held=0
for ((seconds = 0; seconds < 180; seconds++)); do
  sleep 1
  report=$(timeout 5 scontrol show job "$job" -o)
  [[ ! "$report" =~ JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT) ]] || exit
  [[ "$report" =~ \ Restarts=([0-9]+) ]] && ((BASH_REMATCH[1] > restarts)) || continue
  case "$report" in
    *JobState=PENDING*Reason=BeginTime*)
      # Within the second in which it ended the last one, a node refuses a job's new start, and the job fails for it.
      ((++held > 2)) || continue
      scontrol update JobId="$job" StartTime=now || continue
      [[ -n "$told" ]] || printf '{"time": %s, "event": "hold_released", "attempt": %d, "job_id": "%s", "node": "%s"}\n' \
        "$(date +%s.%3N)" "$attempt" "$job" "$host" >>"$events"
      told=yes
      [[ -n "$excluded" ]] || exit
      [[ ! "$report" =~ \ ExcNodeList=([A-Za-z0-9][^ ]*) ]] || excluded+=",${BASH_REMATCH[1]}"
      scontrol update JobId="$job" ExcNodeList="$excluded" || exit
      ;;
    *JobState=PENDING*Reason=BadConstraints* | *JobState=PENDING*Reason=ReqNodeNotAvail*)
      scontrol update JobId="$job" ExcNodeList= && exit
      ;;
    *JobState=RUNNING*) exit ;;
  esac
done
END
  )
}

# True where Slurm has put the job back since this script began
in_the_queue() {
  [[ "$(timeout 5 scontrol show job "$slurm_job" -o 2>/dev/null)" =~ \ Restarts=([0-9]+) ]] &&
    ((BASH_REMATCH[1] > ${SLURM_RESTART_COUNT:-0}))
}

# Usage: requeue REASON. False where Slurm refuses.
requeue() {
  trap '' TERM INT USR2 # Slurm sends SIGTERM to all of the job as soon as it is requeued
  local answer tries
  if [[ "$1" == "node failure" ]] || { [[ "$1" == preemption ]] &&
    [[ "$(timeout 5 scontrol show partition "$SLURM_JOB_PARTITION" -o)" == *PreemptMode=*REQUEUE* ]]; }; then
    was_requeued "$1" # or will be, when this script ends: asked for as well, it would be requeued twice
    return
  fi
  release_hold
  for ((tries = 1; ; tries++)); do
    # What this script ignores, timeout makes its child heed: scontrol, killed before it has the answer, would look refused.
    answer=$(timeout --signal=KILL 10 bash -c "trap '' TERM; exec scontrol requeue $slurm_job" 2>&1) && break
    ! in_the_queue || break # the answer was lost
    say "Slurm does not requeue the job: $answer"
    [[ "$answer" == *"contact slurm controller"* ]] && ((tries < 8)) || return 1 # it may just be starting again
    sleep 5
  done
  is_requeued "$1" "$job_id"
}

# Somebody else has put the job back
was_requeued() {
  release_hold
  is_requeued "$1" "$job_id"
}

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
  if [[ -z "$reason" ]]; then # The ranks were sent a signal, and this script was not.
    ask_slurm
    [[ -z "$preempted_at" ]] || reason=preemption
  fi
  [[ "$reason" != "time limit" && "$reason" != preemption ]] || decision=requeue
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
  [[ "$slurm_state" == RUNNING ]] || return 1
  told=$(grep -lE 'death signal|got signal: 15' "$logs"/*.log 2>/dev/null | wc -l)
  ((told < ${#chosen[@]}))
}

decide_after_failure() {
  cause=$(best_cause "$noted")
  [[ -z "$abandoned" ]] || cause+="; $abandoned"
  decision=next
  list_nodes
  if [[ -n "$lost_nodes" ]]; then
    cause="- $lost_nodes lost by Slurm (NodeFail)"
    return # The run is not at fault.
  fi
  local missed
  mapfile -t missed < <(unreached)
  if ((${#missed[@]} > 0)); then
    suspects+=("${missed[@]%% *}")
    cause="- ${missed[0]%% *} Slurm could not start the ranks there: $(plain <<<"${missed[0]#* }")"
  elif [[ -z "$abandoned" ]]; then # The first task that ended badly; the others were ended because of it.
    mapfile -t -O "${#suspects[@]}" suspects < <(sed -n '/: task /{s/^srun: error: \([^ :]*\): task [0-9]*: Killed.*/\1/p;q}' "$logs/srun.err")
  fi
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
  list_nodes
  must_end || check_nodes || return
  if ! must_end && ! choose_nodes; then
    decision=requeue
    cause="- - too few nodes are left: ${nodes[*]:-none}"
    return
  fi
  if must_end; then
    say "asked to stop before the ranks started"
    exit_code=0
    decide 0
    end_attempt
    return
  fi
  choose_port "${chosen[0]}"
  event attempt_started "\"nodes\": $(json "${chosen[*]}")"
  say "attempt $attempt on ${chosen[*]}, logs of the nodes: $logs"
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

# --- guard.sh beside this script: it brings the job back where this script is killed
start_guard() {
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$host" --cpus-per-task=1 --mem=0 --gres=none \
    --export=ALL --input=none --output=none --error=none \
    bash "$run/guard.sh" 2>>"$run/logs/guard.err" & # where srun tells of its end, which is no news
  guard=$!
}

# --- the job
ended() {
  event job_ended "\"exit_code\": $exit_code, \"signal\": \"$signal\", \"slurm_state\": \"$slurm_state\", \"slurm_reason\": \"$slurm_reason\", \"decision\": \"$decision\""
  say "ended with exit code $exit_code: $decision"
  [[ -z "${guard:-}" ]] || kill -TERM "$guard" 2>/dev/null
}

open_attempt
trap ended EXIT
event job_started "\"nodes\": $(json "$SLURM_JOB_NODELIST")"
say "job $job_id on $SLURM_JOB_NODELIST"
exec {events}<"$run/events.jsonl"
cat <&"$events" >/dev/null # what has happened before this job
case $(awk -F '"event": "' 'split($2, name, "\"") && name[1] ~ /^(job_started|requeued)$/ {last = last " " name[1]} END {print last}' "$run/events.jsonl") in
  " job_started") alert started running "" "" ;;
  *"requeued job_started") ;; # it was said when the job went back into the queue
  *) alert requeued running "its nodes were lost, or taken" "the job has begun again, and resumes" ;;
esac

start_guard

run_attempt
while [[ "$decision" == next && -z "$ending" ]]; do
  open_attempt
  run_attempt
done
finish
