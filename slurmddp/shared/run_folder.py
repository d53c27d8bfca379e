"""Where the files lie that ranks and commands both use: the one place that spells their names.

`slurmddp.run.layout` has the files that only commands and job.sh use.
"""

import os
from dataclasses import dataclass
from pathlib import Path


class Named:
    """A path in a run folder, by its name there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "RunFolder", kind: type) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run's folder. Makes nothing by itself."""

    path: Path

    #: The inputs of the run: versions, commit, hashes, command line.
    manifest = Named("manifest.json")
    #: The resolved job, for the ranks; written at submission.
    job_json = Named("job.json")
    #: The config file of Accelerate that the job names in launch.accelerate, as it was at submission.
    accelerate = Named("accelerate.yaml")
    #: The key that signs the run's messages between nodes. Only the owner can read it (mode 0600).
    key = Named("rendezvous.key")
    #: Private key and certificate of the run, for TLS between its nodes (mode 0600); or why there is none, in a line.
    pair = Named("rendezvous.pem")
    #: The stop file: where it exists, ranks save a checkpoint, then exit.
    stop = Named("stop")
    #: The events: JSON lines, append only.
    events = Named("events.jsonl")
    #: Loss and speed by step: JSON lines, append only, written by rank 0.
    metrics = Named("metrics.jsonl")
    #: Folder of checkpoints, one folder each.
    checkpoints = Named("checkpoints")
    #: Folder of copies of saves of a script of the user's own, which its next start might write over.
    kept = Named("kept")
    #: The progress of the run: "STEP STEPS", written by rank 0.
    progress = Named("progress")
    #: Folder of markers: how each attempt ended, if it ended cleanly.
    markers = Named("markers")
    #: Folder of what ranks traced: sample ids, profiles, flight recorder dumps.
    trace = Named("trace")
    #: The request of `slurmddp debug profile`, until rank 0 has read it.
    profile_request = Named("profile.json")

    @property
    def exists(self) -> bool:
        """Return whether a finished run folder is there: the manifest tells. False if we may not look."""
        return os.path.isfile(self.manifest)  # Path.is_file raises there

    def marker(self, attempt: int) -> Path:
        """Return how one attempt ended, if it ended cleanly: the file that job.sh and `slurmddp status` decide from."""
        return self.markers / f"attempt-{attempt:03d}.json"

    def rank_trace(self, attempt: int, rank: int) -> Path:
        """Sample ids that one rank fed to the model, by step (only with trace_samples)."""
        return self.trace / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.jsonl"

    def profile_trace(self, attempt: int, step: int, rank: int) -> Path:
        """The trace of torch.profiler that one rank wrote, from `step` on."""
        return self.trace / f"attempt-{attempt:03d}" / f"profile-{step:08d}-rank-{rank:05d}.json.gz"

    def observed(self, attempt: int, start: str) -> Path:
        """Return the folder of one start of an own script's ranks: their beats, and their stacks in a hang."""
        return self.trace / f"attempt-{attempt:03d}" / f"observed-{start}"

    def gpu_folder(self, attempt: int) -> Path:
        """Return the folder of what was sampled of GPUs in one attempt."""
        return self.trace / "gpus" / f"attempt-{attempt:03d}"

    def gpu_samples(self, attempt: int, node: str) -> Path:
        """Return what was sampled of one node's GPUs: JSON lines, append only, written by the node's agent."""
        return self.gpu_folder(attempt) / f"{node}.jsonl"
