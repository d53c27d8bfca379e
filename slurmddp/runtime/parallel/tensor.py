"""Layers of the bundled GPT split among the ranks of a tensor group, with sequence parallelism."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from slurmddp.runtime.tasks.gpt import GPT


def split(bare: nn.Module, grid: DeviceMesh) -> None:
    """Split each layer of a GPT over a mesh of one dimension, in place; names stay, parameters become DTensors.

    Attention by heads, the perceptron by its inner width, embeddings and head by the vocabulary, positions by the
    context. Between them, each rank has its part of the sequence: dropout there, and in the heads, is each rank's own.
    Every rank of a group gets all logits.
    """
    # Slow to import, and private before torch 2.5, which FSDP2 needs anyway.
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    assert isinstance(bare, GPT)  # The plan allows no other task.
    bare.multiple = grid.size()
    whole, sequence = Replicate(), Shard(1)
    normed = SequenceParallel(use_local_output=True)
    wide, narrow = ColwiseParallel(input_layouts=sequence), RowwiseParallel(output_layouts=sequence)
    layers = {
        "norm_attention": normed,
        "qkv_by_head": wide,
        "out": narrow,
        "norm_mlp": normed,
        "up": wide,
        "down": narrow,
    }
    plan = {f"blocks.*.{name}": style for name, style in layers.items()}
    plan |= {
        "tokens": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        "positions": RowwiseParallel(input_layouts=whole, output_layouts=Shard(0)),
        "norm": normed,
    }
    if isinstance(bare.head, nn.Linear):
        plan["head"] = ColwiseParallel(input_layouts=sequence, output_layouts=whole)
    else:  # Its weight is the embedding's, split already.
        inputs = PrepareModuleInput(input_layouts=(sequence, None), desired_input_layouts=(whole, None))
        output = PrepareModuleOutput(output_layouts=Shard(2), desired_output_layouts=whole)
        parallelize_module(bare, grid, {"head": inputs})
        plan["head"] = output
    parallelize_module(bare, grid, plan)
