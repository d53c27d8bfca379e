"""Versions of the files of a run folder that programs read: docs/files.md lists their keys and says when one rises.

manifest.json of each run names them; its own version is in slurmddp/run/manifest.py.
"""

JOB = 5
EVENTS = 4
