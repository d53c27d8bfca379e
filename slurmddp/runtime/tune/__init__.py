"""What the ranks of `slurmddp tune` do in place of training: they measure, and rank 0 writes tuned.json."""
