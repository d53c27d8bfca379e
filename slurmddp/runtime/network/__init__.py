"""Between preflight and training: one all-reduce of growing size over all nodes, in the container and environment of
the ranks. `python -m slurmddp.runtime.network RUN`, once on each node.

    __main__.py  starts a rank per GPU, or one rank      rank.py      joins, measures, tests pairs
    nccl_log.py  NCCL's log -> the network it uses, pure pairs.py     which pairs tell who is slow, pure
    judge.py     what it means for the run, pure
"""
