"""From a request to a submitted run: the one place where spec, plan, render, run folder and Slurm meet."""
