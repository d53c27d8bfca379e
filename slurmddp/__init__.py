"""slurmddp: from a training script to a finished multi-node PyTorch run under Slurm and Apptainer.

This file is part of every run's code snapshot and is imported inside the container:
standard library only.
"""

__version__ = "0.1.0"
