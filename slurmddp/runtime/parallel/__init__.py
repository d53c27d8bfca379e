"""Ranks that train one model together: DDP, FSDP and HSDP, and whether replicas are equal."""
