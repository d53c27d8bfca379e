# shellcheck shell=bash
# --- no requeue
# This job is not one that could be brought back.
requeue() { return 1; }
was_requeued() { return 1; }
