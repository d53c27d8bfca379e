"""Ranks that train one model together: the mesh, DDP, FSDP and HSDP, and whether replicas are equal."""
