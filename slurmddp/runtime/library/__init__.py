"""The library for a user's own training script. Import its names from `slurmddp.runtime`.

Modules: `setup` (distributed), `sampler` (GlobalSampler, mean_over_ranks), `checkpointer` (Checkpointer), `stopping`
(should_stop). `shared` has the state that they share in one process.
"""
