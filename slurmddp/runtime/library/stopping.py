"""Whether to stop: asked by people, Slurm and torchrun, answered by all ranks alike."""

from slurmddp.runtime.library import shared


def should_stop() -> bool:
    """Whether any rank was asked to stop: by the run's stop file, SIGTERM, SIGUSR1 or SIGUSR2.

    The same answer on every rank, and every rank has to call it, at the same place: once a step. Save then, and end.

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

    Costs a reduction of one number over gloo on the host: some tenths of a millisecond, and no GPU has to wait for it,
    but the ranks' hosts wait for each other. (Checkpointer.after asks as well, in one reduction with its own question.)
    The stop file, $SLURMDDP_STOP_FILE, is looked for by one rank a node, at most once a second. Once true, it stays so.

    Without `distributed`, signals are noted from the first call of any piece on, those that the script handles itself
    left out; the process group has to be there already, unless the process is alone.
    """
    now = shared.get()
    if now.stopped is not None:
        return True
    now.enter("step", None if now.step is None else now.step)
    return now.agree_to_stop()[0]
