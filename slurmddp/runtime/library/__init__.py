"""The library for a user's own training script. Import its names from `slurmddp.runtime`.

Modules: `setup` (distributed), `sampler` (GlobalSampler, mean_over_ranks), `checkpointer` (Checkpointer), `shared`
(should_stop, and the state that all of them share in one process).
"""
