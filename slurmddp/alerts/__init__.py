"""Alerts on the login side: addresses, which are secrets, and what the nodes could not send.

Messages are made by the run folder's own alert.sh (slurmddp/shell) from its payloads (slurmddp/render/alert_texts.py),
whoever starts it: one place knows what each kind of target takes.
"""
