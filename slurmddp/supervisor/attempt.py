"""One attempt: check the nodes, choose them, train, decide, clean up."""

from typing import Any, Dict, List, Optional

from slurmddp.records.cause import Cause
from slurmddp.records.job_events import USER, AttemptEnded, AttemptStarted, Cleaned, NodeExcluded
from slurmddp.records.refusal import Refusal
from slurmddp.supervisor import warming
from slurmddp.supervisor.brain.decide import decide
from slurmddp.supervisor.brain.types import DONE, NEXT, REQUEUE, Decision, Facts
from slurmddp.supervisor.job import Job, without
from slurmddp.supervisor.preflight import check_nodes, measure_network
from slurmddp.supervisor.save import choose_save
from slurmddp.supervisor.watching import Watching, marker_of


def decide_by(job: Job, facts: Facts) -> Decision:
    """Decide what comes next, from these facts, and carry out what belongs to that."""
    before = job.ledger()
    decision = decide(job.settings, facts, before)
    job.keep(before, decision.ledger)
    job.kept = decision.not_requeued
    for node, reason in decision.exclude:
        job.exclude(reason, [node], lambda name, why: NodeExcluded(name, why, fault=USER))
    job.nodes.suspects += decision.suspects
    if decision.marker is not None:
        job.folder.tell("write_marker", job.attempt, decision.marker.write())
    job.decision, job.cause, job.ended_by = decision.what, decision.cause, decision.ended_by
    return decision


class Attempts:
    """The attempts of this job. `Job` holds how the newest one ended."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.watching = Watching(job)
        self._measured: List[List[str]] = []

    def make(self) -> None:
        """Make the attempt that `job` has opened."""
        job, look = self.job, self.watching.look
        self.watching.new_attempt()
        self.list_nodes()
        if job.values.yes("warm") and not job.must_end():
            warming.keep(job)
        if job.settings.preflight and not job.must_end() and not check_nodes(job, look):
            return
        if not job.must_end() and not job.nodes.choose():
            job.decision = REQUEUE
            job.cause = self._too_few()
            return
        if job.values.yes("measure") and not job.must_end() and not measure_network(job, look, self._measured):
            self.record(None, launched=False)
            return
        if job.settings.preflight == "only" and not job.must_end():
            job.say("recovery.preflight is only: no ranks are started")
            job.exit_code, job.decision = 0, DONE
            return
        if not job.must_end() and not choose_save(job, look):
            self.record(self.decide(), launched=False)
            return
        if job.must_end():
            job.say("asked to stop before the ranks started")
            job.exit_code = 0
            self.record(self.decide(), launched=False)
            return
        self._train()

    def _too_few(self) -> Cause:
        return Cause("too few usable nodes: {}".format(" ".join(self.job.nodes.usable) or "none"))

    def _train(self) -> None:
        job = self.job
        if job.nodes.lost and not job.nodes.choose():
            job.decision = REQUEUE
            job.cause = self._too_few()
            return
        job.choose_port(job.head)
        nodes = " ".join(job.nodes.chosen)
        job.event(AttemptStarted(nodes))
        job.say("attempt {} on {}; node logs: {}".format(job.attempt, nodes, job.logs))
        job.watch.launched(job.moment(), len(job.nodes.chosen))
        job.exit_code = job.on_nodes(job.logs + "/%N.log", self._command(), self.watching.look, together=True)
        job.folder.known(None, "show", job.logs, patience=30)
        self.watching.read_events()
        self.record(self.decide(), launched=True)
        if job.decision == NEXT and job.cause is not None:
            job.watch.failed(job.cause)
        if self._may_clean():
            self._sweep()

    def _command(self) -> List[str]:
        job, words = self.job, self.job.values.node_script()
        each = job.values.number("tasks_per_node")
        if each is None:
            return words
        # launch.mode srun; of an option that is given twice, srun takes the last one
        tasks = ["--ntasks={}".format(len(job.nodes.chosen) * each), "--ntasks-per-node={}".format(each)]
        return [*tasks, *job.values.rank_options, *words]

    def list_nodes(self) -> List[str]:
        """Take the nodes that the job has now; return those that Slurm has lost."""
        job = self.job
        over, allocated = job.scheduler.ends_job(), job.scheduler.nodes()
        lost = job.nodes.renew(allocated) if allocated is not None else ()
        if over:  # Slurm lists the nodes that still have processes of the job: the others are not lost
            lost = ()
        if allocated is not None and not job.values.yes("counts_gpus"):
            job.gpus = (job.values.number("gpus_per_node") or 0) * len(allocated)
        job.exclude("Slurm lost the node", lost, NodeExcluded)
        return list(lost)

    def decide(self) -> Decision:
        return decide_by(self.job, self._facts())

    def _facts(self) -> Facts:
        job, watch = self.job, self.job.watch
        marker = marker_of(job.folder.known(None, "marker", job.attempt))
        stop = job.stop_file()
        failed = job.exit_code != 0 or bool(watch.abandoned) or (marker is not None and marker.state != DONE)
        logs: Dict[str, Any] = {"refused": {}, "unreached": [], "killed_agents": [], "signalled": 0}
        if failed and not job.ending:
            logs = job.folder.known(logs, "ended", job.logs, job.nodes.chosen, patience=60)
        silent = tuple(job.nodes.lost)
        lost = self.list_nodes() if failed and not (job.ending or stop or marker) else []
        return Facts(
            job.attempt, job.exit_code, job.scheduler.job, marker, stop, job.ending, job.back, job.kept, watch.noted,
            logged=job.find_cause(watch.noted or watch.exited) if failed and not job.ending else None,
            abandoned=watch.abandoned, uncounted=watch.uncounted, hopeless=watch.hopeless,
            saved=job.saved() if stop is not None else None,
            chosen=tuple(job.nodes.chosen), silent=silent, lost=tuple(lost),
            refused={node: Refusal(*fields) for node, fields in logs["refused"].items()},
            unreached=tuple((node, text) for node, text in logs["unreached"]),
            killed_agents=tuple(logs["killed_agents"]), signalled=logs["signalled"], stranger=watch.stranger,
        )  # fmt: skip

    def record(self, decision: Optional[Decision], launched: bool) -> None:
        """Record how the attempt ended."""
        job, cause = self.job, self.job.cause or Cause("")
        ended_by, kept = (decision.ended_by, decision.not_requeued) if decision else ("", "")
        ended = AttemptEnded(job.exit_code, cause.text, cause.node, cause.rank, job.decision, ended_by, kept)
        job.event(ended._replace(kind=cause.kind, more=cause.more))
        how = ": its ranks exited with code {}".format(job.exit_code) if launched else " ended"
        text = ", " + cause.line() if cause.text else ""
        job.say("attempt {}{}{}; decision: {}".format(job.attempt, how, text, job.decision))

    def _sweep(self) -> None:
        """Remove what the attempt left on its nodes: processes, shared memory, scratch."""
        job = self.job
        job.nodes.chosen = without(job.nodes.excluded, job.nodes.chosen)
        self._clean(job.env["SLURMDDP_RENDEZVOUS_ID"], job.logs)
        job.event(Cleaned(job.folder.known("", "removed", job.logs)))

    def end_warm(self) -> None:
        """End the warm processes, if there are any, and remove what they leave."""
        job = self.job
        if job.warm is not None and self._may_clean():
            job.nodes.chosen = list(job.nodes.usable)
            self._clean(job.env["SLURMDDP_WARM"], job.run + "/logs/warm")

    def _clean(self, attempt: str, logs: str) -> None:
        job = self.job
        if job.nodes.chosen:
            env, words = job.sweep_environment(attempt, logs), job.values.program("sweep")
            job.on_nodes(logs + "/sweep.out", words, self.watching.look, 20, env=env, last=True)

    def take_up(self, nodes: List[str], lost: str) -> None:
        """Decide about the attempt of a supervisor that was lost with its node, and end what is left of it."""
        job = self.job
        job.nodes.chosen, job.exit_code = nodes, 137
        decision = decide_by(job, self._facts()._replace(silent=(lost,)))
        self.record(decision, launched=False)
        if decision.what == NEXT:
            job.watch.failed(decision.cause)
        job.nodes.chosen = list(job.nodes.usable)
        self._sweep()

    def _may_clean(self) -> bool:
        """Slurm starts nothing more in a job that it ends, and kills what is left there."""
        return not self.job.ending or (self.job.scheduler.takes_steps() and not self.job.back)
