"""Why attempts fail: the rules, and the one engine that finds causes in logs by them.

`find` is for the supervisor, status and alerts; `slurmddp.doctor` reads the second part of the rules. Standard library
and slurmddp.records only, and Python 3.6: it travels to the batch host.
"""
