# shellcheck shell=bash
# --- between the check of the nodes and the start of the ranks: how fast is the network between them, and which is it?
measured= # the nodes of the newest measurement

# Measure, unless the same nodes were measured before. Replace slow nodes while there are enough others. False if the
# run must not continue.
measure_network() {
  local began word text facts bad=() line try
  for try in 1 2; do
    ((${#chosen[@]} > 1)) && [[ "${chosen[*]}" != "$measured" ]] || return 0
    measured=${chosen[*]}
    began=$SECONDS
    ask_network
    ! must_end || return 0
    word=none text="not measured: see $logs/network" facts='{"result": "none"}' bad=()
    while IFS= read -r line; do
      case $line in
        "") ;;
        "facts "*) facts=${line#facts } ;;
        "bad "*) bad+=("${line#bad }") ;;
        *) word=${line%% *} text=${line#* } ;;
      esac
    done <<<"`cat "$logs/network/verdict" 2>/dev/null`" # plain text, made by slurmddp.runtime.network
    say "network: $text"
    event network "\"seconds\": $((SECONDS - began)), \"text\": `json "$text"`, \"measured\": $facts"
    ((try == 1 && ${#bad[@]} > 0 && ${#nodes[@]} - ${#bad[@]} >= nodes_min)) || break
    for line in "${bad[@]}"; do
      note_excluded "network: ${line#* }" "${line%% *}"
    done
    drop_excluded
    choose_nodes
  done
  [[ "$word" == tcp ]] || return 0
  decision=failed
  exit_code=1
  cause="- - $text"
  return 1
}

# One process per node, started like the ranks. srun's messages about it are not about the ranks.
ask_network() {
  mkdir -p "$logs/network"
  rm -f "$logs/network/verdict"
  choose_port "${head_address:-${chosen[0]}}"
  within=(timeout --kill-after=5 "$join_timeout")
  together=0 SLURMDDP_STEP=network SLURMDDP_NETWORK_NODES="${chosen[*]}" \
    on_nodes "$logs/network/%N.log" bash "$run/node.sh"
  within=()
  child=
  mv "$logs/srun.err" "$logs/network/srun.err" 2>/dev/null || true
}
