"""check JOB.yaml: what will go wrong with a job, found before it waits in the queue."""
