"""From the resolved job to its plan."""

from slurmddp.container import Container, runtime_named
from slurmddp.errors import UserError, collecting, together
from slurmddp.job.plan.alerts import plan_alerts, plan_mail, plan_watchdog
from slurmddp.job.plan.batch import plan_batch
from slurmddp.job.plan.environment import plan_environment
from slurmddp.job.plan.layout import gpus_per_node, plan_layout
from slurmddp.job.plan.model import Context, Note, Plan
from slurmddp.job.plan.nodes import plan_nodes
from slurmddp.job.plan.parallel import check_parallel, check_tensor
from slurmddp.job.plan.program import (
    absolute,
    check_image,
    data_paths,
    plan_accelerate,
    plan_container,
    plan_program,
    plan_watch,
    plan_workdir,
    runtime_job,
)
from slurmddp.job.plan.ranks import plan_srun
from slurmddp.job.plan.recovery import max_restarts, plan_cancel_grace, plan_recovery, plan_stop_lead
from slurmddp.job.plan.sbatch import missing_settings, plan_sbatch
from slurmddp.job.resolve import Resolved


def _first_notes(resolved: Resolved, context: Context) -> list[Note]:
    """Return warnings of the layers, and settings that the site requires and nobody set (not inside an allocation)."""
    missing = [] if context.inside else missing_settings(resolved)
    texts = (*resolved.warnings, *(f"{error.what}: `submit` will reject the job" for error in missing))
    return [Note("warning", text) for text in texts]


def _doubts(resolved: Resolved, container: Container, stop_lead: int | None, inside: bool) -> list[Note]:
    """Warn of settings that are allowed, but will not do what their author expects."""
    job, notes = resolved.job, []
    schedule, steps = job.train.schedule, job.train.steps
    if job.train.task and schedule.warmup > steps:
        text = f"train.schedule.warmup {schedule.warmup} is longer than train.steps {steps}: lr never reaches its peak"
        notes.append(Note("note", text))
    if not container.proven:
        text = "was never run: slurmddp renders the job, and its recovery is not proven"
        notes.append(Note("warning", f"container.runtime {container.runtime} {text}"))
    image = resolved.layered.origins.get(("container", "image"))
    if not container.needs_image and image is not None and not image.layer.startswith("site "):
        unused = f"the image is ignored, because container.runtime is {container.runtime}"
        todo = f"to use it, set container.runtime to {runtime_named(None).runtime}, else remove it"
        notes.append(Note("warning", f"{image.of('container.image')}: {unused}: {todo}"))
    if resolved.site.queues and job.resources.time and not stop_lead and not inside:
        text = "the job is too short for a save before its time limit: progress since the last checkpoint will be lost"
        notes.append(Note("note", text))
    return notes


def make_plan(resolved: Resolved, context: Context) -> Plan:
    """Raises UserError for whatever cannot become a job at this site."""
    job, site = resolved.job, resolved.site
    errors: list[UserError] = []
    with collecting(errors):
        gpus = gpus_per_node(resolved)
        nodes, notes = plan_nodes(resolved, gpus, context.allocation)
        layout, more = plan_layout(resolved, nodes, gpus, context.allocation)
    with collecting(errors):
        program = plan_program(job, context)._replace(wrap=job.launch.wrap)
    with collecting(errors):
        check_image(resolved)
    if errors:
        raise together(errors)
    notes += more
    notes = _first_notes(resolved, context) + notes
    check_tensor(resolved, nodes)
    batch = None
    sizes = job.train.batch
    if job.train.task or sizes.global_ or (sizes.micro and nodes.world):
        taking = nodes.by_tensor(job.parallel.tensor)
        batch, more = plan_batch(sizes, taking, resolved.location("train", "batch"))
        notes += more
    notes += check_parallel(resolved, nodes)
    container = plan_container(resolved, layout, program, context)
    cache = absolute(job.paths.cache, context.cwd) if job.paths.cache else None
    workdir = plan_workdir(job, program, context)
    watch = plan_watch(job, program, workdir)
    groups = plan_environment(resolved, nodes, layout, container, cache, watch)
    recovery, more = plan_recovery(resolved, nodes, layout, watch, context.inside)
    notes += more
    alerts, more = plan_alerts(resolved, context)
    notes += more
    stop_lead = plan_stop_lead(job.resources.time, job.timeouts.stop, context.save_seconds)
    notes += _doubts(resolved, container, stop_lead, context.inside)
    sbatch = plan_sbatch(resolved, nodes, layout, recovery, stop_lead) if site.queues else ()
    return Plan(
        job=job,
        site=site,
        version=context.version,
        inside=context.inside,
        cwd=context.cwd,
        workdir=workdir,
        nodes=nodes,
        layout=layout,
        batch=batch,
        stop_lead=stop_lead,
        cancel_grace=plan_cancel_grace(job.resources.time, job.timeouts.stop, context.save_seconds)
        if program.own
        else None,
        sbatch=(*sbatch, *plan_mail(resolved)),
        container=container,
        environment=groups,
        srun=plan_srun(resolved, nodes, layout, container),
        accelerate=plan_accelerate(resolved, context),
        max_restarts=max_restarts(job),
        recovery=recovery,
        alerts=alerts,
        watchdog=plan_watchdog(resolved, context),
        program=program,
        runs_root=absolute(job.paths.runs, context.cwd),
        cache=cache,
        node_folder=absolute(job.paths.node, context.cwd),
        resume_from=context.resume_from,
        runtime_job=runtime_job(job, batch, context) if job.train.task and batch else None,
        data_paths=data_paths(job, context),
        notes=tuple(notes),
    )
