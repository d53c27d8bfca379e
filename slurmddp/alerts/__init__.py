"""Alerts on the login side: addresses, which are secrets, and what the nodes could not send.

Messages are made by the run folder's own alert.sh (templates/sbatch), whoever starts it: there is one place that
knows what each kind of target takes.
"""
