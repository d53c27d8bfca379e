# shellcheck shell=bash
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
    within=(timeout --kill-after=5 "$join_timeout")
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
