# shellcheck shell=bash
# --- before the ranks start: can these nodes train? Those that cannot are excluded. False if this attempt is over.
check_nodes() {
  local node line verdict="$logs/preflight/verdict" missed=() bad=() user_errors=0 began=$SECONDS
  local -A said=()
  chosen=("${nodes[@]}") # spares, too
  ask_nodes
  ! must_end || return 0
  if ((${#missed[@]} > 0)); then
    read_said <<<"`printf '%s\n' "${missed[@]}"`"
  elif [[ -e "$verdict" ]]; then
    read_said <<<"`plain_lines <"$verdict"`"
  fi
  for node in "${chosen[@]}"; do
    line=${said[$node]:-}
    if ((${#missed[@]} > 0)); then
      [[ -n "$line" ]] || continue # Whether it can train is seen once it is asked without those.
      line="Slurm could not start a process there: $line"
    elif [[ -s "$logs/preflight/$node.failed" ]]; then
      line="bad `plain <"$logs/preflight/$node.failed"`"
    elif [[ ! -e "$verdict" && "$node" != "${chosen[0]}" ]]; then
      continue # The first node should have said it.
    fi
    [[ "$line" != ok* ]] || continue
    bad+=("$node")
    line=${line#bad }
    line=${line:-no answer: see $logs/preflight/$node.log}
    ((${#bad[@]} > 1)) || cause="- $node preflight: $line"
    [[ ! "$line" =~ $user_error ]] || ((user_errors += 1))
    note_excluded "preflight: $line" "$node"
  done
  drop_excluded
  event preflight "\"seconds\": $((SECONDS - began)), \"bad\": `json "${bad[*]}"`, \"checked\": ${#chosen[@]}, \"warnings\": `preflight_warnings`"
  if ((${#bad[@]} == 0)); then
    rm -f "$run/preflight-failed"
    return 0
  fi
  # If all nodes have the same problem, or earlier nodes had it, other nodes would not help.
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

# A list in JSON, which the first node has written: one text for all nodes with the same warning
preflight_warnings() { cat "$logs/preflight/warnings.json" 2>/dev/null || echo '[]'; }

# What is said of each node, into `said`: lines of NODE TEXT, of which a node's first counts. All in this process: there
# may be thousands of nodes, and each child process costs milliseconds.
read_said() {
  local node text
  while read -r node text; do
    [[ -z "$node" || -n "${said[$node]+there}" ]] || said[$node]=$text
  done
}

# If srun could not reach a node, try once more: its slurmd may just be starting. Sets `missed`.
ask_nodes() {
  local try
  for try in 1 2; do
    choose_port "${chosen[0]}"
    within=(timeout --kill-after=5 "$join_timeout")
    together=0 SLURMDDP_STEP=preflight SLURMDDP_PREFLIGHT_NODES="${chosen[*]}" \
      on_nodes "$logs/preflight/%N.log" bash "$run/node.sh"
    child=
    lines_of missed unreached
    ((${#missed[@]} > 0 && try == 1)) && ! must_end || return 0
    say "Slurm could not start the preflight on ${missed[0]%% *}: ${missed[0]#* }; trying once more"
    mv "$logs/srun.err" "$logs/srun.first.err"
    rm -f "$logs"/preflight/*
    sleep 5 &
    child=$!
    wait_for_child
    child=
  done
}
