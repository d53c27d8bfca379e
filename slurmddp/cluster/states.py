"""The states of a job: ours, into which Slurm's words are parsed here and nowhere else."""

from __future__ import annotations

from enum import Enum


class JobState(Enum):
    """Our word for how a job is, and Slurm's words for the same (squeue(1), "JOB STATE CODES")."""

    PENDING = ("pending", "PENDING")
    PREPARING = ("preparing nodes", "CONFIGURING")
    RUNNING = ("running", "RUNNING", "SUSPENDED", "RESIZING", "SIGNALING", "STOPPED")
    ENDING = ("ending", "COMPLETING", "STAGE_OUT")
    REQUEUED = ("requeued", "REQUEUED", "REQUEUE_FED")
    HELD = ("held", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
    UNKNOWN = ("unknown",)
    COMPLETED = ("done", "COMPLETED")
    FAILED = ("failed", "FAILED")
    NOT_LAUNCHED = ("failed", "LAUNCH_FAILED", "RECONFIG_FAIL")
    CANCELLED = ("cancelled", "CANCELLED", "REVOKED")
    TIMED_OUT = ("timed out", "TIMEOUT")
    PAST_DEADLINE = ("timed out", "DEADLINE")
    NODE_FAILED = ("node failure", "NODE_FAIL", "BOOT_FAIL")
    OUT_OF_MEMORY = ("out of memory", "OUT_OF_MEMORY")
    PREEMPTED = ("preempted", "PREEMPTED")

    def __init__(self, text: str, *words: str) -> None:
        self.text, self.words = text, words

    @classmethod
    def of(cls, word: str) -> JobState:
        """Return the state for Slurm's word, such as `CANCELLED by 1000`."""
        base = base_state(word)
        return next((state for state in cls if base in state.words), cls.UNKNOWN)

    @property
    def over(self) -> bool:
        """Return whether nothing of the job runs any more, or ever will."""
        states = list(JobState)
        return states.index(self) > states.index(JobState.UNKNOWN)


def base_state(text: str) -> str:
    """Slurm's state word alone: `CANCELLED by 1000` and `CANCELLED+` are CANCELLED."""
    words = text.split()
    return words[0].rstrip("+").upper() if words else ""
