"""Before the first step: python -m slurmddp.runtime.preflight RUN, once on each node, in the container of the ranks.

Every node reports to the head (the first node) over the rendezvous port, and meets it again on random ports both
ways; then the others meet each other. The head compares the reports and writes which node can train and which cannot,
and why. All nodes at once, so the time does not grow with their number. Standard library only: it takes no second that
torch would need. Only matmul.py imports torch: a program of its own, on nodes with GPUs.

    node_settings.py  what the scripts told this node
    checks/      what is looked at, one module each       judge.py     reports -> verdict; which nodes meet, pure
    node.py      a node's side of the star                head.py      the first node's side
    gpu_speed.py  how fast each GPU is, and which one is slow
"""
