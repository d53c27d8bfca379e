"""Finished images for tests that want to run one, not to build one."""

import os
import shutil
import subprocess

from .build import locked, wanted
from .cluster import TORCH_IMAGE_ROOT, Cluster
from .host import LOGIN, USER_IDS
from .variant import variant

TORCH_IMAGE = "/home/alice/images/bookworm-torch.sif"


def definition(base: str, *sections: str) -> str:
    """The text of a definition file that starts from a folder on the hosts."""
    return "\n\n".join([f"Bootstrap: localimage\nFrom: {base}", *sections]) + "\n"


def make_torch_image(cluster: Cluster) -> str:
    """The image with torch in alice's home, built by her where the cache has none; its path on the hosts.

    Without Apptainer on the hosts there is none: Alice.software() takes their own Python.
    """
    if not variant().apptainer:
        return ""
    target = cluster.machine_path(TORCH_IMAGE)
    if target.exists():
        return TORCH_IMAGE
    roots = wanted().image_roots
    cached = roots.with_name(f"{roots.name}.sif")
    cluster.write("/home/alice/images/bookworm-torch.def", definition(TORCH_IMAGE_ROOT))
    with locked(cached.with_suffix(".lock")):
        if not cached.exists():
            command = ["apptainer", "build", TORCH_IMAGE, "/home/alice/images/bookworm-torch.def"]
            cluster.run(LOGIN, command, timeout=600)
            temporary = cached.with_suffix(".new")
            shutil.copyfile(target, temporary)
            temporary.rename(cached)
            return TORCH_IMAGE
    # --reflink: no second copy of 300 MB where the file system can share blocks
    subprocess.run(["cp", "--reflink=auto", str(cached), str(target)], check=True)
    target.chmod(0o755)
    os.chown(target, USER_IDS["alice"], USER_IDS["alice"])
    return TORCH_IMAGE
