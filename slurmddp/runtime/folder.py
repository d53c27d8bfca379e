"""Where everything of a run lies in its folder: the one place that knows the runtime's file names."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run's folder. Makes nothing by itself."""

    root: Path

    @property
    def job(self) -> Path:
        """The resolved job, written at submission."""
        return self.root / "job.json"

    @property
    def key(self) -> Path:
        """What the run's messages between nodes are signed with: its owner's alone (mode 0600)."""
        return self.root / "rendezvous.key"

    @property
    def events(self) -> Path:
        """What happened: JSON lines, append only."""
        return self.root / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """Loss and speed by step: JSON lines, append only, written by rank 0."""
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Curves for TensorBoard, where it is installed."""
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints, one folder each."""
        return self.root / "checkpoints"

    @property
    def progress(self) -> Path:
        """How far the run has come: "STEP STEPS", written by rank 0."""
        return self.root / "progress"

    def marker(self, attempt: int) -> Path:
        """How an attempt ended, if it ended cleanly: the file that job.sh decides from."""
        return self.root / "markers" / f"attempt-{attempt:03d}.json"

    def trace(self, attempt: int, rank: int) -> Path:
        """Sample ids that one rank fed to the model, by step (only with trace_samples)."""
        return self.root / "trace" / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.jsonl"
