"""torchrun, with the variables of an Accelerate config file: python -m slurmddp.runtime.agent.accelerate FILE RUN ...

`accelerate launch` makes variables of such a file, and calls torchrun. Here Accelerate's own code makes the variables,
and this process becomes slurmddp's torchrun (`exec`), which has nothing of what Accelerate has imported or started.
What the file says of nodes, ranks, addresses and GPUs has no effect: node.sh knows them.

No other module uses private names of Accelerate. They were seen in its version 1.15.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmddp.runtime.environment import own_node
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.watch import marker, usererrors
from slurmddp.shared.run_folder import RunFolder

#: These stay as they are. torchrun sets the first two on each rank. The third, for CPUs, is meant for mpirun, which
#: gives each rank cores of its own: here it would pin all ranks of a node to the same ones.
_NOT_OF_THE_FILE = ("MASTER_ADDR", "MASTER_PORT", "KMP_AFFINITY")


def main(words: list[str]) -> None:
    """words: the file, the run folder, then torchrun's own options."""
    try:
        if len(words) < 3:
            raise UserError("usage: python -m slurmddp.runtime.agent.accelerate FILE RUN_FOLDER TORCHRUN_OPTIONS ...")
        found = variables(words[0], _ranks(words[2:]))
    except UserError as error:
        print(f"slurmddp: node {own_node()}: {error}", file=sys.stderr)
        if usererrors.stays(error):
            _give_up(words[1:2], str(error))
        raise SystemExit(1) from None
    new = " ".join(f"{name}={value}" for name, value in sorted(found.items()) if os.environ.get(name) != value)
    print(f"slurmddp: node {own_node()}: from launch.accelerate: {new}", flush=True)
    os.execve(sys.executable, [sys.executable, "-m", "slurmddp.runtime.agent", *words[1:]], found)


def variables(file: str, ranks: int) -> dict[str, str]:
    """Return the environment that `accelerate launch --config_file FILE` gives its ranks, in this one.

    Raises UserError if there is no Accelerate, or if it rejects the file.
    """
    try:
        from accelerate import __version__
        from accelerate.commands import launch
    except ImportError as error:
        lacks = f"no accelerate in {sys.executable}: install it in the image, or correct container.python"
        raise UserError(lacks if error.name == "accelerate" else f"launch.accelerate: {error}") from error
    # One machine, all GPUs and any free port: what else it says of them is for torchrun alone.
    alone = ["--num_machines=1", f"--num_processes={ranks}", "--main_process_port=0", "--gpu_ids=all"]
    try:
        found = _of_accelerate(launch, [f"--config_file={file}", *alone, "script"])
    except AttributeError as error:
        raise UserError(
            f"launch.accelerate: slurmddp cannot use the file with Accelerate {__version__} (seen with 1.15): {error}"
        ) from error
    except (Exception, SystemExit) as error:  # whatever it raises for a wrong file
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"launch.accelerate: Accelerate {__version__} rejects the config file: {said}") from error
    own = {name: os.environ[name] for name in _NOT_OF_THE_FILE if name in os.environ}
    return {**{name: value for name, value in found.items() if name not in _NOT_OF_THE_FILE}, **own}


def _of_accelerate(launch: Any, words: Sequence[str]) -> Mapping[str, str]:
    """Do what its `launch_command` does, up to the start of the ranks."""
    args = launch.launch_command_parser().parse_args(words)
    args, defaults, precision_of_file = launch._validate_launch_command(args)
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if precision_of_file else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        _, found = launch.prepare_deepspeed_cmd_env(args)
    elif args.use_fsdp or args.use_megatron_lm or args.multi_gpu:
        found = launch.prepare_multi_gpu_env(args)
    else:
        _, found = launch.prepare_simple_launcher_cmd_env(args)
        return found  # type: ignore[no-any-return]
    if not launch.check_cuda_p2p_ib_support():
        found = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", **found}
    return found  # type: ignore[no-any-return]


def _ranks(options: Sequence[str]) -> int:
    """Ranks of this node; 1 where torchrun is to count them."""
    name = "--nproc-per-node="
    told = [option.removeprefix(name) for option in options if option.startswith(name)]
    return int(told[0]) if told and told[0].isdecimal() else 1


def _give_up(folder: Sequence[str], why: str) -> None:
    """Tell job.sh that no further start will help: all nodes have the same file, and the same image."""
    attempt = os.environ.get("SLURMDDP_ATTEMPT", "")
    if folder and attempt.isdecimal():
        marker.give_up(RunFolder(Path(folder[0])).marker(int(attempt)), int(attempt), why)


if __name__ == "__main__":
    main(sys.argv[1:])
