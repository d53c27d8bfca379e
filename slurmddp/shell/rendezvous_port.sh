# shellcheck shell=bash
# --- the port on which the agents of an attempt meet

# Above Linux's ephemeral ports; from job, run and attempt, so that those side by side differ; probed, since others may
# listen.
# Usage: choose_port HEAD_NODE
choose_port() {
  local seed tries
  seed=`printf '%s %s %s' "$job_id" "$run" "$attempt" | cksum | cut -d' ' -f1`
  port=$((61000 + seed % 4500))
  for ((tries = 0; tries < 20; tries++)); do
    timeout 2 bash -c "exec 3<>/dev/tcp/$1/$port" 2>/dev/null || break
    port=$((61000 + (port - 60999) % 4500))
  done
  export SLURMDDP_PORT=$port
}
