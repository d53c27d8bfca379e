"""Checkpoints: written so that a kill at any moment loses nothing, and verified before they are loaded.

`slurmddp.shared.checkpoint` says what is in a checkpoint's folder.
"""
