"""From sample ids to micro batches: the order of the samples, how a batch is dealt, the loader."""
