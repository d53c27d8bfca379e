"""Typer commands, one module a group: parse, call, print. Imports of what a command needs stand inside it, so that
`slurmddp --help` stays quick. typer evaluates the annotations of every command: written as text (`from __future__`)
each would be compiled four times, so these modules do without."""

import gc

# Nearly all objects that a command makes live to its end, and there are many: looking through them for garbage, again
# and again, would find next to nothing.
gc.set_threshold(100_000)
