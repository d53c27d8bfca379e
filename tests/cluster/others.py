"""Programs of others on the test cluster: their sources, what they need, and how each is started.

The sources are not part of this repository: $SLURMDDP_OTHERS names a folder of clones (tests/README.md).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from . import frameworks
from .cluster import Cluster
from .frameworks import Environment, make_environment
from .host import LOGIN, USER_IDS

VARIABLE = "SLURMDDP_OTHERS"
HOME = "/home/alice/others"
PACKAGES = (
    *("timm", "torchvision", "lightning", "jsonargparse[signatures]"),
    *("antlr4-python3-runtime==4.9.3", "hydra-core==1.3.2", "fsspec", "boto3", "requests"),
    *("transformers", "datasets", "accelerate", "evaluate", "scikit-learn"),
)
#: PyPI's torchvision is built with CUDA. Without it, its operators do not load, and its import needs them to be known.
TORCHVISION = """\
import sys

class BeforeTorchvision:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.torchvision_operators = library  # they live as long as it does

sys.meta_path.insert(0, BeforeTorchvision())
"""


@dataclass(frozen=True)
class Other:
    """A program that somebody else wrote.

    folder:    below $SLURMDDP_OTHERS; it is copied, and the job is submitted in it. Its steps never end.
    for_cpu:   by file: (text, what stands there for a machine without a GPU). Nothing else of the sources changes.
    settings:  keys of the job file that it needs.
    data:      a Python program that makes stand-ins for the program's data, from input.txt in the folder.
    after_a_kill: what slurmddp has to say that its next start went on from.
    kill_at:   the step after which a rank is killed, counted by its optimizer.
    """

    title: str
    folder: str
    script: str
    arguments: tuple[str, ...]
    data: str
    nodes: int = 1
    ranks_per_node: int = 2
    for_cpu: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    after_a_kill: str = "from zero"
    kill_at: int = 60


NANO_GPT = Other(
    "nanoGPT",
    "nanoGPT",
    "train.py",
    (
        *("config/train_shakespeare_char.py", "--device=cpu", "--backend=gloo", "--compile=False", "--dtype=float32"),
        *("--n_layer=2", "--n_head=2", "--n_embd=64", "--block_size=64", "--batch_size=8", "--eval_iters=5"),
        *("--eval_interval=50", "--gradient_accumulation_steps=2", "--max_iters=6000", "--lr_decay_iters=6000"),
    ),
    'import shutil, runpy; shutil.copy("input.txt", "data/shakespeare_char"); '
    'runpy.run_path("data/shakespeare_char/prepare.py")',
    nodes=2,
    ranks_per_node=1,
    for_cpu={
        "train.py": (
            ("    device = f'cuda:{ddp_local_rank}'\n    torch.cuda.set_device(device)\n", ""),
            ("DDP(model, device_ids=[ddp_local_rank])", "DDP(model)"),
        )
    },
)
MIN_GPT = Other(
    "minGPT-ddp",
    "examples/distributed/minGPT-ddp/mingpt",
    "main.py",
    (
        *("data_config.path=input.txt", "data_config.truncate=0.005", "data_config.block_size=32"),
        *("gpt_config.n_layer=2", "gpt_config.n_head=2", "gpt_config.n_embd=32", "trainer_config.use_amp=false"),
        *("trainer_config.batch_size=16", "trainer_config.data_loader_workers=0", "trainer_config.save_every=1"),
        "trainer_config.max_epochs=100",
    ),
    "",
    after_a_kill="went on",  # from gpt_snapshot.pt, which it saves after each epoch of about 136 steps
    kill_at=150,
    for_cpu={
        "main.py": (
            ("    return has_gpu and gpu_count >= min_gpus", "    return True"),
            ('    device: torch.device = torch.device(f"{acc}:{rank}")\n', ""),
            ("    backend = torch.distributed.get_default_backend_for_device(device)\n", '    backend = "gloo"\n'),
            ("    torch.accelerator.set_device_index(rank)\n", ""),
        ),
        "trainer.py": (
            ('torch.device(f"{self.acc}:{self.local_rank}")', 'torch.device("cpu")'),
            ("model.to(self.local_rank)", "model.to(self.device)"),
            ("DDP(self.model, device_ids=[self.local_rank])", "DDP(self.model)"),
            ("source.to(self.local_rank)", "source.to(self.device)"),
            ("targets.to(self.local_rank)", "targets.to(self.device)"),
        ),
    },
)
TIMM = Other(
    "timm",
    "pytorch-image-models",
    "train.py",
    (
        *("--data-dir", "images", "--model", "test_resnet", "--img-size", "32", "--num-classes", "2"),
        *("--device", "cpu", "--workers", "1", "--batch-size", "4", "--epochs", "100", "--log-interval", "20"),
    ),
    """\
import numpy, os
from PIL import Image

chance = numpy.random.default_rng(0)
for split, count in (("train", 600), ("validation", 40)):
    for kind in ("dark", "light"):
        os.makedirs(f"images/{split}/{kind}", exist_ok=True)
        for number in range(count):
            pixels = chance.integers(0, 128, (32, 32, 3), dtype=numpy.uint8) + (0 if kind == "dark" else 100)
            Image.fromarray(pixels.astype(numpy.uint8)).save(f"images/{split}/{kind}/{number}.png")
""",
    for_cpu={"train.py": (("task.prepare_distributed(device_ids=[device], ", "task.prepare_distributed("),)},
)
LIGHTNING = Other(
    "Lightning",
    "pytorch-lightning/examples/pytorch/basics",
    "autoencoder.py",
    (
        *("--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.max_epochs=100"),
        "--trainer.enable_progress_bar=false",
    ),
    """\
import os, torch

os.makedirs("../../Datasets/MNIST/complete", exist_ok=True)
for name, count in (("training", 60000), ("test", 200)):
    rows = torch.randint(0, 255, (count, 28, 28), dtype=torch.uint8)
    torch.save((rows, torch.zeros(count, dtype=torch.int64)), f"../../Datasets/MNIST/complete/{name}.pt")
""",
    # Its data are two folders above its file, and a copy of that folder has nothing there.
    settings=("snapshot=false", "environment.PL_USE_MOCKED_MNIST=1"),
)
RUN_CLM = Other(
    "run_clm",
    "transformers/examples/pytorch/language-modeling",
    "run_clm.py",
    (
        *("--config_name", "model", "--tokenizer_name", "model", "--train_file", "input.txt", "--do_train"),
        *("--block_size", "64", "--per_device_train_batch_size", "4", "--max_steps", "20000", "--save_steps", "50"),
        *("--logging_steps", "10", "--output_dir", "out", "--use_cpu", "--report_to", "none", "--disable_tqdm", "true"),
    ),
    """\
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Config, PreTrainedTokenizerFast

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
tokenizer.train(["input.txt"], trainers.BpeTrainer(vocab_size=500, special_tokens=["<|endoftext|>"]))
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained("model")
GPT2Config(vocab_size=500, n_positions=64, n_embd=32, n_layer=2, n_head=2).save_pretrained("model")
""",
    after_a_kill="unknown",  # it reads a file of its cache that its first start has made
    settings=("environment.HF_HUB_OFFLINE=1",),
)
OTHERS = (NANO_GPT, MIN_GPT, TIMM, LIGHTNING, RUN_CLM)


def sources() -> Path | None:
    """The folder with their clones, if there is one."""
    text = os.environ.get(VARIABLE)
    return Path(text) if text else None


def make_others_environment(cluster: Cluster, image: str) -> Environment:
    """The venv with what all of them need, in alice's home."""
    folder = f"{frameworks.HOME}/{PACKAGES[0]}"
    packages = f"{folder}/lib/python3.11/site-packages"
    if cluster.machine_path(f"{packages}/before_torchvision.pth").exists():
        return Environment(folder, {})  # of an earlier session, in a cluster that stays up
    environment = make_environment(cluster, image, PACKAGES)
    cluster.write(f"{packages}/before_torchvision.py", TORCHVISION)
    cluster.write(f"{packages}/before_torchvision.pth", "import before_torchvision\n")
    return environment


def install(cluster: Cluster, image: str, environment: Environment, other: Other, folder: Path, copy: str) -> str:
    """Copy the program into alice's home, ready for a CPU and with data; the folder that it is submitted in."""
    target = f"{HOME}/{copy}/{other.folder}"
    place = cluster.machine_path(target)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder / other.folder, place, ignore=shutil.ignore_patterns(".git"))
    for name, changes in other.for_cpu.items():
        text = (place / name).read_text()
        for old, new in changes:
            assert old in text, f"{other.title}: {name} is another version: it does not contain {old!r}"
            text = text.replace(old, new)
        (place / name).write_text(text)
    library = Path(sysconfig.get_path("stdlib"))
    text = "".join(path.read_text() for path in sorted(library.glob("[a-d]*.py")))
    (place / "input.txt").write_text("".join(letter for letter in text if letter.isascii()))
    owner = str(USER_IDS["alice"])
    # Of this copy only: files that change while another test's run goes on look as if that run had saved them.
    own = cluster.machine_path(f"{HOME}/{copy}/{Path(other.folder).parts[0]}")
    subprocess.run(["chown", f"{owner}:{owner}", str(own.parent.parent), str(own.parent)], check=True)
    subprocess.run(["chown", "-R", f"{owner}:{owner}", str(own)], check=True)
    if other.data:
        python = ["apptainer", "exec", "--bind", environment.folder, image, f"{environment.folder}/bin/python"]
        cluster.run(LOGIN, [*python, "-c", other.data], cwd=target, timeout=300)
    return target
