"""Where the files lie that ranks and commands both use: the one place that spells their names.

`slurmddp.run.layout` has the files that only commands and job.sh use.
"""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run's folder. Makes nothing by itself."""

    path: Path

    @property
    def exists(self) -> bool:
        """Return whether a finished run folder is there: the manifest tells. False if we may not look."""
        return os.path.isfile(self.manifest)  # Path.is_file raises there

    @property
    def manifest(self) -> Path:
        """The inputs of the run: versions, commit, hashes, command line."""
        return self.path / "manifest.json"

    @property
    def job_json(self) -> Path:
        """The resolved job, for the ranks; written at submission."""
        return self.path / "job.json"

    @property
    def accelerate(self) -> Path:
        """The config file of Accelerate that the job names in launch.accelerate, as it was at submission."""
        return self.path / "accelerate.yaml"

    @property
    def key(self) -> Path:
        """The key that signs the run's messages between nodes. Only the owner can read it (mode 0600)."""
        return self.path / "rendezvous.key"

    @property
    def stop(self) -> Path:
        """The stop file: where it exists, ranks save a checkpoint, then exit."""
        return self.path / "stop"

    @property
    def events(self) -> Path:
        """The events: JSON lines, append only."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """Loss and speed by step: JSON lines, append only, written by rank 0."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints, one folder each."""
        return self.path / "checkpoints"

    @property
    def kept(self) -> Path:
        """Folder of copies of saves of a script of the user's own, which its next start might write over."""
        return self.path / "kept"

    @property
    def progress(self) -> Path:
        """The progress of the run: "STEP STEPS", written by rank 0."""
        return self.path / "progress"

    @property
    def markers(self) -> Path:
        """Folder of markers: how each attempt ended, if it ended cleanly."""
        return self.path / "markers"

    def marker(self, attempt: int) -> Path:
        """Return how one attempt ended, if it ended cleanly: the file that job.sh and `slurmddp status` decide from."""
        return self.markers / f"attempt-{attempt:03d}.json"

    @property
    def trace(self) -> Path:
        """Folder of what ranks traced: sample ids, profiles, flight recorder dumps."""
        return self.path / "trace"

    def rank_trace(self, attempt: int, rank: int) -> Path:
        """Sample ids that one rank fed to the model, by step (only with trace_samples)."""
        return self.trace / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.jsonl"

    @property
    def profile_request(self) -> Path:
        """The request of `slurmddp debug profile`, until rank 0 has read it."""
        return self.path / "profile.json"

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
