"""Apptainer and Singularity, which take the same command line."""

import re
from collections.abc import Iterable

from slurmddp.container.base import Container


class Apptainer(Container):
    """`apptainer exec IMAGE`."""

    __slots__ = ()
    runtime = executable = "apptainer"
    environment_prefix = "APPTAINERENV_"
    takes_sif = True
    devices = {"nvidia": "--nv", "amd": "--rocm"}
    node_part = """\
# --- the container
container=(
  "${starter[@]}" "$code" container "$scratch/$SLURMDDP_RENDEZVOUS_ID/image" "$image" # stays mounted at SIGTERM
  {{ c.executable | quote }} exec\
{% if c.contained %} --workdir "$scratch/$SLURMDDP_RENDEZVOUS_ID"{% endif %}\
{% for option in c.options %} {{ option | quote }}{% endfor %} --pwd "$workdir"
{% if c.contained %}
  "${devices[@]}"
{% endif %}
  --bind "$run:$run:rw"{% if plan.cache %} --bind "$cache:$cache:rw"{% endif %} \
--bind "$scratch:$scratch:rw" "${binds[@]}"
  "$image"
)

"""
    plain_part = """\
  {{ c.executable | quote }} exec{% for option in c.options %} {{ option | quote }}{% endfor %} \
--pwd {{ plan.workdir | quote_run }}{% for bind in binds %} --bind {{ bind | quote }}{% endfor %} \\
  {{ c.image | quote }} \\
"""

    @property
    def contained(self) -> bool:
        """Return whether an option gives it a /dev, /tmp and home of its own."""
        return any(map(contains, self.options))

    def words(self, binds: Iterable[str]) -> list[str]:
        """Return `apptainer exec ... IMAGE`."""
        bound = [word for bind in binds for word in ("--bind", bind)]
        return [self.executable, "exec", *self.options, *bound, str(self.image)]


class Singularity(Apptainer):
    """`singularity exec IMAGE`."""

    __slots__ = ()
    runtime = executable = "singularity"
    environment_prefix = "SINGULARITYENV_"


def contains(option: str) -> bool:
    """Return whether an option of `apptainer exec` gives the container a /dev, /tmp and home of its own.

    Apptainer and SingularityCE both know -c, -C, the long names, and --compat, which implies --containall
    (cmd/internal/cli/action_flags.go). Short ones may stand together, as in -ce; -B, -H, -S, -W and -o take the rest
    of the word for their value.
    """
    name, given, value = option.partition("=")
    if given and value.lower() in ("0", "f", "false"):
        return False
    return name in ("--contain", "--containall", "--compat") or re.match("-[^-BHSWo]*[cC]", name) is not None
