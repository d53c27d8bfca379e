"""Checkpoint folders without torch. `checkpoints.Checkpoints` saves, lists, verifies, prunes and exports them; `layout`
has names and hashes, `contents` and `shards` read pickles of torch and run nothing of them.

step-00001000/
  manifest.json        step, world, mesh, global batch, code and config hash; each file with bytes and sha256
  *.distcp .metadata   torch.distributed.checkpoint shards, loadable on any number of ranks
  data.json            position in the data, counted over all ranks
  rng/rank-00000.pt    random states of each rank
  scheduler.pt         state of the learning-rate scheduler, if there is one
  COMPLETE             the sha256 of manifest.json, written last
"""
