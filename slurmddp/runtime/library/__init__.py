"""The pieces for a training script of one's own; `slurmddp.runtime` has their names.

The modules: `setup` (distributed), `sampler` (GlobalSampler, mean_over_ranks), `checkpointer` (Checkpointer),
`stopping` (should_stop). `shared` is what they have in common in one process.
"""
