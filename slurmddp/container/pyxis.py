"""pyxis: srun itself makes the container, by enroot, whose hooks bring the GPUs."""

from slurmddp.container.base import Container


class Pyxis(Container):
    """`srun --container-image=IMAGE`, in a job step of its own."""

    __slots__ = ()
    runtime, executable = "pyxis", "srun"
    made_by_srun = True
    proven = False
    node_part = """\
# --- the container: srun makes it, in a nested job step. What follows env overrides the image's variables
mounts="$run:$run:rw{% if plan.cache %},$cache:$cache:rw{% endif %},$scratch:$scratch:rw"\
{% for bind in c.binds %}{{ ("," ~ bind.spec) | quote }}{% endfor %}

container=(
  srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$host" --cpu-bind=none\
{% if plan.layout.cpus_per_node %} --cpus-per-task={{ plan.layout.cpus_per_node }}{% endif %} --export=ALL --input=none
  --container-image="$image" --container-workdir="$workdir"\
{% for option in c.options %} {{ option | quote }}{% endfor %}

  --container-mounts="$mounts" env PYTHONPATH={{ python_path_of_ranks() }}
)

"""
    node_variables = """\
container+=(GLOO_SOCKET_IFNAME="$GLOO_SOCKET_IFNAME"\
{% for group in groups %}{% for variable in group.variables %} {{ variable.name }}="${{ variable.name }}"\
{% endfor %}{% endfor %})

"""
    plain_part = """\
  --container-image={{ c.image | quote }} --container-workdir={{ plan.workdir | quote_run }}\
{% for option in c.options %} {{ option | quote }}{% endfor %} \\
  --container-mounts={{ binds | join(",") | quote }} \\
"""
