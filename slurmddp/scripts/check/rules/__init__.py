"""The rules, by subject. Importing this package registers all of them."""

from slurmddp.scripts.check.rules import launchers, rendezvous, slurm, text

__all__ = ["launchers", "rendezvous", "slurm", "text"]
