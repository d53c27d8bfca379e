"""Let bash evaluate a batch script, with nothing real within reach, and record what would start."""
