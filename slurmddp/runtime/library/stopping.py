"""Requests to stop, from people, Slurm and torchrun."""

from slurmddp.runtime.library import shared


def should_stop() -> bool:
    """Return whether any rank was asked to stop, by the run's stop file, SIGTERM, SIGUSR1 or SIGUSR2.

    The answer is the same on every rank, and every rank must call it at the same point, once per step. If it is true,
    save a checkpoint and exit. Once true, it stays true.

    >>> from slurmddp.runtime import distributed, should_stop
    >>> import os, signal
    >>> with distributed():
    ...     for step in range(1, 100):
    ...         if step == 3:
    ...             os.kill(os.getpid(), signal.SIGUSR1)
    ...         if should_stop():
    ...             print("save here, at step", step)
    ...             break  # doctest: +ELLIPSIS
    stopping   SIGUSR1 received by rank 0 on ...
    save here, at step 3

    It costs an all-reduce of one number over gloo on the host: some tenths of a millisecond. No GPU waits for it, but
    the hosts of the ranks wait for each other. (Checkpointer.after asks, too, in the all-reduce that it needs anyway.)
    One rank per node checks for the stop file, $SLURMDDP_STOP_FILE, at most once a second.

    Without `distributed`, signals count from the first call of any function of this library, except those that the
    script handles itself. Then the process group must exist already, unless the process is alone.
    """
    now = shared.get()
    if now.stopped is not None:
        return True
    now.enter("step", None if now.step is None else now.step)
    return now.agree_to_stop()[0]
