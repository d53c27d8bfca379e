"""The rules, by subject. Importing this package registers all of them."""

from slurmddp.scripts.check.rules import environment, launchers, ranks, rendezvous, slurm, text, words

__all__ = ["environment", "launchers", "ranks", "rendezvous", "slurm", "text", "words"]
