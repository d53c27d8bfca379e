"""torchrun with a rendezvous that strangers cannot write to: python -m slurmddp.runtime.agent RUN TORCHRUN_OPTIONS ...

torchrun's own c10d rendezvous unpickles whatever is in a store that listens on all interfaces and asks nobody who he
is. Here, everything that agents tell each other is signed with the run's key. On one node, the agents' store is inside
of the process, and the ranks' store listens on the loopback interface only. docs/security.md says what that holds
against, and what PyTorch leaves open.

    torchrun.py  the agent itself; what comes before it needs no torch
    signed.py    what agents exchange, signed: rendezvous state, ranks, the address of the ranks' store
    stores.py    the stores, each bound to one address
    handlers.py  torchrun's rendezvous handlers on top of both; which save the ranks of a script may load
    warm.py, warm_parent.py  forks the agent from a process that has imported torch for all attempts
    pauses.py    notices that this agent did not run for a while
    forking.py   forks the ranks from a process that has imported torch (forking_template.py)
"""
