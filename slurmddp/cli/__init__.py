"""Typer commands, one module a group: parse, call, print. Imports of what a command needs stand inside it, so that
`slurmddp --help` stays quick."""
