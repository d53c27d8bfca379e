"""From sample ids to micro batches: the order of the samples, the loader."""
