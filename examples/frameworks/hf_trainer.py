"""Hugging Face Trainer: continues after a killed rank, a lost node, the time limit, a requeue, and with --resume.

    slurmddp submit examples/frameworks/hf_trainer.py --nodes 2 -- --steps 1000

What slurmddp needs are the lines that name a variable SLURMDDP_..., `resume_from_checkpoint`, and the callback `Stop`.
"""

import argparse
import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from slurmddp.runtime import should_stop

CHECKPOINTS = Path(os.environ["SLURMDDP_RUN"], "checkpoints")
OLDER = [Path(folder) for folder in os.environ.get("SLURMDDP_RESUME_FROM", "").split(":") if folder]


class Stop(TrainerCallback):
    """Save a checkpoint and end when slurmddp asks for it: before the time limit, or on `slurmddp cancel`."""

    def on_step_end(self, args, state, control, **_):
        if should_stop():
            control.should_save = control.should_training_stop = True


def newest_checkpoint() -> Path | None:
    """The newest whole checkpoint of this run, else of those that it resumes. The Trainer writes its state last."""
    for folder in (CHECKPOINTS, *OLDER):
        whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
        if whole:
            return max(whole, key=lambda path: int(path.name.rpartition("-")[2]))
    return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()

    torch.manual_seed(0)
    tokens = torch.randint(64, (2048, 1)) + torch.arange(32)  # rows that count upwards
    data = [{"input_ids": row % 64, "labels": row % 64} for row in tokens]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))

    arguments = TrainingArguments(
        output_dir=str(CHECKPOINTS),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        save_steps=20,
        save_total_limit=2,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Stop()])
    newest = newest_checkpoint()
    if trainer.is_world_process_zero():
        print(f"attempt {os.environ['SLURMDDP_ATTEMPT']} begins with {newest}", flush=True)
    trainer.train(resume_from_checkpoint=None if newest is None else str(newest))


if __name__ == "__main__":
    main()
