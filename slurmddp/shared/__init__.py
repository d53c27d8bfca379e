"""What the commands and the ranks both use: the run folder's files, and arithmetic that must give both the same result.

Standard library only, and no other package of slurmddp: each run folder gets a copy, in code/slurmddp/shared, beside
the runtime that imports it.
"""
