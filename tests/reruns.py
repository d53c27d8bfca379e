"""Count the tests that passed only at a second try: each is named, and more than two fail the run.

SLURMDDP_RERUNS=FILE    count over several pytest sessions: each adds its lines to FILE (`make test` sets it)
"""

import os
from pathlib import Path

import pytest

ALLOWED = 2
VARIABLE = "SLURMDDP_RERUNS"
_all = pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if hasattr(config, "workerinput") or reporter is None:  # A worker of xdist: its reports reach the main process.
        return
    reruns = [report.nodeid for report in reporter.stats.get("rerun", [])]
    if counted := os.environ.get(VARIABLE):
        path = Path(counted)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(f"{name}\n" for name in reruns)
        reruns = path.read_text().splitlines()
    config.stash[_all] = reruns
    if len(reruns) > ALLOWED and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reruns = config.stash.get(_all, [])
    if not reruns and not config.getoption("reruns", None):
        return
    too_many = len(reruns) > ALLOWED
    where = "in this run of `make test`, until now" if os.environ.get(VARIABLE) else "in this session"
    terminalreporter.section(f"reruns: {len(reruns)} {where} ({ALLOWED} allowed)", red=too_many, yellow=bool(reruns))
    for name in reruns:
        terminalreporter.write_line(f"RERUN {name}")
    if too_many:
        terminalreporter.write_line(f"FAILED: more than {ALLOWED} tests had to run twice. Find the cause of each.")
