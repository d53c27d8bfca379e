# shellcheck shell=bash
# --- back into the queue as a new job, which waits for the end of this one
# The site forbids scontrol requeue: this script is submitted again, to begin when this job has ended. Usage: requeue REASON
requeue() {
  trap '' TERM INT USR2
  local next without=() after=afterany:$job_id
  # A sweep with --at-most: one job of this name at a time. The option below would replace that of the script.
  ! grep -qsx '#SBATCH --dependency=singleton' "$run/job.sh" || after+=,singleton
  ((${#excluded[@]} == 0)) || without=(--exclude="$(IFS=,; echo "${excluded[*]}")")
  next=$(
    cd "${run%/*}" || exit # as at the first submission
    for name in $(compgen -e); do # what this job was given is not what the next one asks for
      case $name in
        SLURM_CONF | SLURM_CONF_SERVER | SLURM_JWT) ;; # how to reach Slurm at all
        SLURMDDP_* | SLURM_* | SLURMD_* | SBATCH_* | SRUN_* | SALLOC_* | PMIX_* | PMI_* | SQUEUE_* | SACCT_* | SCANCEL_* | SCONTROL_*)
          unset "$name"
          ;;
      esac
    done
    timeout 20 sbatch --parsable --dependency="$after" --output="${run//%/%%}/logs/job.log" "${without[@]}" "$run/job.sh" "$run"
  ) || {
    say "could not submit the job that should continue the run"
    return 1
  }
  is_requeued "$1" "${next%%;*}"
}

was_requeued() { is_requeued "$1" "$job_id"; }
