"""What one node sees by itself, and the file that shows the others that its run folder is theirs."""

import asyncio

from slurmddp.records.preflight import Finding, bad
from slurmddp.runtime.preflight import checks
from slurmddp.runtime.preflight.gpu_speed import Measurement
from slurmddp.runtime.preflight.judge import Report
from slurmddp.runtime.preflight.node_settings import NodeSettings
from slurmddp.runtime.preflight.protocol import token_file
from slurmddp.shared.files import write_whole

#: Part of the time that looking may take: a file system that hangs is to be reported, too.
_PART = 0.5


async def look(settings: NodeSettings) -> Report:
    """Return all checks of checks.ALONE and the facts of checks.SAME, in a thread that may never come back."""
    now: list[str] = []
    seconds = _PART * settings.seconds
    try:
        return await asyncio.wait_for(asyncio.to_thread(_look, settings, now), seconds)
    except asyncio.TimeoutError:
        reason = f"got no answer within {seconds:.0f} s when it checked: {' '.join(now[-1:])}"
        finding = bad(reason, "a file system or GPU driver hangs on the node: ask the site's support to check it")
        return Report([finding], {}, {}, settings.interface, settings.network)


def _look(settings: NodeSettings, now: list[str]) -> Report:
    measurement = Measurement(settings)
    findings = checks.alone(settings, now)
    seen, failed = checks.facts(settings, now)
    now.append("speed of GPUs")
    speeds, unknown = measurement.result()
    found = [*findings, *failed, *unknown]
    return Report(found, {}, seen, settings.interface, settings.network, speeds=speeds)


def show(settings: NodeSettings, token: str) -> list[Finding]:
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
        write_whole(token_file(settings.folder, settings.node), token)
    except OSError as error:
        todo = "check whether the file system is full, over quota, or mounted read-only on this node"
        return [bad(f"cannot write to the run folder ({settings.folder}): {error.strerror}", todo)]
    return []


def take_away(settings: NodeSettings) -> None:
    try:
        token_file(settings.folder, settings.node).unlink(missing_ok=True)
    except OSError:
        pass
