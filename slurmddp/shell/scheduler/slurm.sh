# shellcheck shell=bash
# --- the job as Slurm knows it; local.sh has the same functions
host=${SLURMD_NODENAME:-$HOSTNAME} # sbatch and srun hand on HOSTNAME as it was where they were called
job_id=${SLURM_JOB_ID:?this script runs inside a Slurm job}
slurm_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID} # a task's own id is that of the whole array
slurm_job=${slurm_job:-$job_id}
job_nodes=$SLURM_JOB_NODELIST # as Slurm writes it
head_address=                 # of each attempt: its first node
restarts=${SLURM_RESTART_COUNT:-0}
preempted_at=
node_list=$SLURM_JOB_NODELIST

# What Slurm says of this job now; where it does not answer, what it said last
ask_slurm() {
  local report began
  report=`timeout 5 scontrol show job "$slurm_job" -o 2>/dev/null`
  [[ "$report" =~ \ StartTime=([0-9][^ ]*) ]] && began=${BASH_REMATCH[1]}
  [[ ! "$report" =~ JobState=([A-Z_]+) ]] || slurm_state=${BASH_REMATCH[1]}
  [[ ! "$report" =~ Reason=([A-Za-z_]+) ]] || slurm_reason=${BASH_REMATCH[1]}
  [[ ! "$report" =~ \ Restarts=([0-9]+) ]] || restarts=${BASH_REMATCH[1]}
  # Slurm keeps the time of a preemption that was before this start
  [[ ! "$report" =~ \ PreemptTime=([0-9][^ ]*) || "${BASH_REMATCH[1]}" < "${began:-}" ]] || preempted_at=${BASH_REMATCH[1]}
  [[ ! "$report" =~ \ NodeList=([A-Za-z0-9][^ ]*) ]] || node_list=${BASH_REMATCH[1]}
}

# Why this script got a signal, into `ending`: scancel, the time limit, a preemption and a requeue send the same one, and
# only Slurm knows which of them it was.
find_reason() {
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
}

# Cancel the job, so that Slurm does not start it again
withdraw() { timeout 5 scancel "$slurm_job" >/dev/null 2>&1; }

# The nodes that the job has now, one a line
allocated_nodes() { scontrol show hostnames "$node_list"; }

# The job's GPUs, for nodes that may differ in them, into `step_options`. A step gets the GPUs that were asked for, not
# those that came with whole nodes: it has to ask for all of the job's. False where the job has none.
count_gpus() {
  local gpus=0 kind kinds=()
  unset SLURM_GPUS SLURM_GPUS_PER_NODE # the job's own wish, which srun would take for the step's
  [[ ! "`scontrol show job -d "$SLURM_JOB_ID" -o`" =~ JOB_GRES=([^ ]*) ]] || IFS=, read -ra kinds <<<"${BASH_REMATCH[1]}"
  for kind in "${kinds[@]}"; do # gpu:4 or gpu:a100:4
    [[ ! "$kind" =~ ^gpu(:[^:]*)?:([0-9]+) ]] || gpus=$((gpus + BASH_REMATCH[2]))
  done
  step_options=(--gpus="$gpus" "${step_options[@]}")
  ((gpus > 0))
}

# Usage: on_nodes LOG COMMAND...; in the background, since bash runs a trap only between commands
on_nodes() {
  local log=$1 list=()
  shift
  export SLURMDDP_NODES=${#chosen[@]}
  [[ -z "$elastic" ]] || list=(--nodelist="`IFS=,; printf '%s' "${chosen[*]}"`")
  "${within[@]}" srun \
    --nodes="${#chosen[@]}" --ntasks="${#chosen[@]}" --ntasks-per-node=1 "${list[@]}" --cpu-bind=none \
    "${step_options[@]}" --kill-on-bad-exit="$together" --wait=0 --export=ALL --input=none \
    --output="$log" --open-mode=append \
    "$@" 2>>"$logs/srun.err" &
  child=$!
  [[ -z "$ending" ]] || kill -TERM "$child" 2>/dev/null # the signal came before there was a child
  wait_for_child
}

# guard.sh beside this script, or on every node of a job that may lose nodes: it brings the job back where this script is
# killed, or dies with its node and the others live on.
start_guard() {
  local where=(--nodes=1 --ntasks=1 --nodelist="$host")
  if [[ -n "$elastic" ]]; then
    list_nodes
    where=(--no-kill --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1)
  fi
  srun --overlap "${where[@]}" --cpus-per-task=1 --mem=0 --gres=none --export=ALL --input=none --output=none --error=none \
    bash "$shell/guard.sh" "$requeue_policy" "$breaker" "$elastic" \
    2>>"$run/logs/guard.err" & # where srun tells of its end, which is no news
  guard=$!
}
