"""Alerts on the login side: addresses, which are secrets, and what the nodes could not send.

Messages are made by slurmddp/supervisor/deliver.py from the run's payloads (slurmddp/render/alert_texts.py), whoever
sends them: one place knows what each kind of target takes.
"""
