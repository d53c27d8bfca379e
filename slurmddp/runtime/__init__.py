"""What runs on the nodes, inside the container: one process a rank, started by torchrun.

Standard library and torch only (tasks/images.py alone may use numpy and PIL). This module imports nothing,
so that the login side can import the pure parts (`batch`, `job`, `folder`) without paying for torch.
"""
