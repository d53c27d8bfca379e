"""What known libraries do by themselves: read in their code and documentation (2026-11)."""

from __future__ import annotations

import re

_LIGHTNING = r"(?:pytorch_lightning|lightning|lightning_pytorch)(?:\.\w+)*\.(?:Trainer|LightningCLI)"
_HF = r"(?:transformers|trl|sentence_transformers|setfit)(?:\.\w+)*\.\w*Trainer"
_FABRIC = r"(?:lightning|lightning_fabric)(?:\.\w+)*\.Fabric"
_ACCELERATE = r"accelerate(?:\.\w+)*\.Accelerator"
_DEEPSPEED = r"deepspeed(?:\.\w+)*\.initialize"
_CHECKPOINTER = r"slurmddp\.runtime(?:\.\w+)*\.Checkpointer"

#: slurmddp's own library: what saves, what loads, and what joins the ranks and takes the GPU of LOCAL_RANK.
CHECKPOINTER = re.compile(_CHECKPOINTER)
CHECKPOINTER_SAVES = re.compile(rf"{_CHECKPOINTER}\(\)\.(?:save|after|follow)")
CHECKPOINTER_LOADS = re.compile(rf"{_CHECKPOINTER}\(\)\.(?:load|resume|follow)")
SAMPLER = re.compile(r"slurmddp\.runtime(?:\.\w+)*\.GlobalSampler")
DISTRIBUTED = re.compile(r"slurmddp\.runtime(?:\.\w+)*\.distributed")

#: Frameworks by the call that makes their object; a call of one of its methods counts, too.
FRAMEWORKS = {
    "Lightning": _LIGHTNING,
    "transformers Trainer": _HF,
    "Fabric": _FABRIC,
    "Accelerate": _ACCELERATE,
    "DeepSpeed": _DEEPSPEED,
    "Composer": r"composer(?:\.\w+)*\.Trainer",
    "Ray Train": r"ray\.train(?:\.\w+)*\.\w*Trainer",
}
FRAMEWORK = {name: re.compile(rf"(?:{pattern})(?:\(\)(?:\.\w+)*)?") for name, pattern in FRAMEWORKS.items()}

#: Which frameworks answer a fact with yes, whatever the script does besides.
DOES = {
    "process_group": {*FRAMEWORKS},
    "wraps_model": {"Lightning", "transformers Trainer", "DeepSpeed", "Composer"},
    "local_rank_device": {"Lightning", "transformers Trainer", "Fabric", "Accelerate", "DeepSpeed", "Composer"},
    "shards_data": {"Lightning", "transformers Trainer"},
    "set_epoch": {"Lightning", "transformers Trainer"},
    "seeds": {"transformers Trainer"},
}

#: Calls that answer a fact with yes.
CALLS = {
    "process_group": (
        r"torch\.distributed(?:\.\w+)*\.(?:init_process_group|init_device_mesh)",
        r"accelerate(?:\.\w+)*\.PartialState",
        r"deepspeed(?:\.\w+)*\.init_distributed",
        r"horovod(?:\.\w+)*\.init",
        r"timm\.utils(?:\.\w+)*\.init_distributed_device(?:_so)?",
        DISTRIBUTED.pattern,
    ),
    "wraps_model": (
        r"torch\.nn\.parallel(?:\.\w+)*\.DistributedDataParallel",
        r"torch\.distributed(?:\.\w+)*\.(?:FullyShardedDataParallel|fully_shard|replicate)",
        r"apex\.parallel(?:\.\w+)*\.DistributedDataParallel",
        r"fairscale(?:\.\w+)*\.(?:FullyShardedDataParallel|ShardedDataParallel)",
        r"horovod(?:\.\w+)*\.(?:DistributedOptimizer|allreduce|allreduce_async_?)",
        rf"{_ACCELERATE}\(\)\.prepare(?:_model)?",
        rf"{_FABRIC}\(\)\.(?:setup|setup_module)",
        r"ray\.train\.torch\.prepare_model",
    ),
    "shards_data": (
        r"torch\.utils\.data(?:\.\w+)*\.DistributedSampler",
        r"\w[\w.]*\.\w*Distributed\w*Sampler",
        r"(?:datasets|datasets\.distributed)\.split_dataset_by_node",
        rf"{_ACCELERATE}\(\)\.(?:prepare_data_loader|split_between_processes)",
        rf"{_FABRIC}\(\)\.setup_dataloaders",
        r"ray\.train\.torch\.prepare_data_loader",
        r"composer(?:\.\w+)*\.get_sampler",
        SAMPLER.pattern,
    ),
    "seeds": (
        r"torch(?:\.\w+)*\.manual_seed(?:_all)?",
        r"(?:pytorch_lightning|lightning|lightning_fabric)(?:\.\w+)*\.seed_everything",
        rf"{_FABRIC}\(\)\.seed_everything",
        r"(?:accelerate|transformers)(?:\.\w+)*\.(?:set_seed|enable_full_determinism)",
        r"timm\.utils(?:\.\w+)*\.random_seed",
    ),
    "requeues": (r"submitit(?:\.\w+)*\.(?:AutoExecutor|SlurmExecutor|DelayedSubmission)",),
    "starts_ranks": (
        r"torch\.multiprocessing(?:\.\w+)*\.(?:spawn|start_processes)|torch_xla(?:\.\w+)*\.spawn",
        r"accelerate(?:\.\w+)*\.(?:notebook_launcher|debug_launcher)",
        r"submitit(?:\.\w+)*\.(?:AutoExecutor|SlurmExecutor)",
        r"ray(?:\.train(?:\.\w+)*\.TorchTrainer|\.init)",
        r"torch\.distributed\.(?:run|launch|launcher)(?:\.\w+)*",
        r"horovod(?:\.\w+)*\.run",
    ),
    "data_from_internet": (
        r"datasets\.load_dataset",
        r"urllib\.request\.(?:urlopen|urlretrieve)",
        r"requests\.(?:get|request)",
        r"wget\.download|gdown\.download|nltk\.download|tensorflow_datasets\.load|sklearn\.datasets\.fetch_\w+",
        r"(?:torch_geometric|torchtext|ogb)(?:\.\w+)*\.(?:datasets(?:\.\w+)*|\w*Dataset)\.?\w*|evaluate\.load",
        r"torch\.hub\.(?:load|load_state_dict_from_url|download_url_to_file)",
        r"torchvision\.datasets\.utils\.\w*download\w*",
        r"(?:huggingface_hub)(?:\.\w+)*\.(?:snapshot_download|hf_hub_download)",
        r"(?:transformers|diffusers)(?:\.\w+)*\.from_pretrained",
    ),
    "stops": (
        r"slurmddp\.runtime(?:\.\w+)*\.should_stop",
        rf"{_CHECKPOINTER}\(\)\.(?:after|follow)",
        r"signal\.(?:signal|sigwait)",
        r"(?:pytorch_lightning|lightning)(?:\.\w+)*\.OnExceptionCheckpoint",
    ),
}
CALL = {name: re.compile("|".join(f"(?:{each})" for each in patterns)) for name, patterns in CALLS.items()}

#: Libraries that are read as they are documented: they do nothing of the above without a call that CALLS knows.
_KNOWN = """
    absl accelerate aiohttp albumentations apex ase attr attrs av Bio bitsandbytes blobfile boto3 click clip
    cloudpickle colorlog comet_ml composer cv2 datasets dateutil decord deepspeed dgl diffusers dill dotenv e3nn
    editdistance einops evaluate fairscale faiss filelock fire flash_attn flax fsspec ftfy future fvcore gensim
    git gym gymnasium h5py horovod httpx huggingface_hub humanize hydra imageio inflect iopath jax jieba jiwer
    joblib jsonargparse kornia librosa liger_kernel lightning lightning_fabric lightning_utilities lmdb loguru
    lpips matplotlib mlflow monai moviepy mpi4py msgpack natsort neptune netCDF4 networkx nibabel nlp nltk numba
    numpy ogb omegaconf open3d open_clip openai optax orjson packaging pandas panopticapi peft PIL pkg_resources
    plotly portalocker prettytable psutil pyarrow pycocotools pydantic pydicom pymatgen pynvml pyrootutils
    pytorch3d pytorch_lightning pytz ray rdkit regex requests rich rootutils rouge_score ruamel ruamel_yaml
    sacrebleu safetensors scipy seaborn sentence_transformers sentencepiece setfit setuptools sh simple_parsing
    SimpleITK six skimage sklearn slurmddp soundfile spacy statsmodels submitit tabulate tenacity tensorboard
    tensorboard_logger tensorboardX tensorflow termcolor thop tiktoken timm tokenizers toml tomli torch
    torch_cluster torch_geometric torch_scatter torch_sparse torch_xla torchaudio torchdata torchdiffeq torchinfo
    torchmetrics torchsde torchsummary torchtext torchvision tqdm transformers trimesh triton trl typer
    typing_extensions ujson unidecode visdom wandb webdataset xarray xformers xxhash yaml zarr
"""
KNOWN = frozenset(_KNOWN.split())

#: Without one of these, a program trains nothing that slurmddp starts.
TRAINING = {
    "torch", "lightning", "pytorch_lightning", "accelerate", "transformers", "deepspeed", "trl", "composer",
    "fairscale", "horovod", "ignite", "monai", "sentence_transformers", "timm", "torch_geometric",
}  # fmt: skip

#: Facts about the text of the script and its modules alone.
OF_SCRIPT = {
    "sets_omp", "sets_visible_devices", "data_in_tmp", "data_beside_script", "requeues", "rank_in_name", "saves_in_run",
}  # fmt: skip

#: Attributes and calls that bring code which is not seen in the text.
DYNAMIC = re.compile(
    r"builtins\.(?:exec|__import__)|importlib\.import_module|runpy\.\w+|hydra\.utils\.(?:instantiate|get_class|get_method|call)"
)
