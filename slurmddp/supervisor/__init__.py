"""The job's supervisor: what job.sh starts on the batch host. Standard library only, and Python 3.6."""
