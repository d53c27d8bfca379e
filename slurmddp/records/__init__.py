"""What crosses a process: one frozen type per record, which its writers and its readers share.

Standard library only, and Python 3.6: the batch host may have nothing newer. Each run folder gets a copy, in
code/slurmddp/records, beside the runtime that imports it.
"""
