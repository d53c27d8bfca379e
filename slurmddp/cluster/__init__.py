"""The only code that runs Slurm commands, and its stand-in for machines without Slurm.

Import what is needed from the modules: `base` (JobId, JobView, Scheduler), `client` (Slurm), `local` (Local),
`parse` (pure parsers), `duration` (Slurm's times).
"""
