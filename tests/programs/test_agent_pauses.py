"""An agent that was stopped says so once it runs again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from slurmddp.runtime.agent.pauses import LOOK

AGENT = """
import time
from slurmddp.runtime.agent import pauses
pauses.PAUSE = 2
pauses.start(lambda facts: print(facts.seconds, flush=True))
print("watches", flush=True)
time.sleep(60)
"""


def test_a_stopped_agent_tells_how_long_it_did_not_run() -> None:
    with subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stdout and agent.stdout.readline() == "watches\n"
            begin = time.monotonic()
            os.kill(agent.pid, signal.SIGSTOP)
            time.sleep(2 + 2 * LOOK)
            os.kill(agent.pid, signal.SIGCONT)
            seconds = float(agent.stdout.readline())
            assert 2 <= seconds <= time.monotonic() - begin
        finally:
            agent.kill()
