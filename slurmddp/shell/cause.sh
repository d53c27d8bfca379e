# shellcheck shell=bash
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
