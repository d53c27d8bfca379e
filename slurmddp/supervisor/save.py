"""launch.mode srun: the supervisor chooses the save that all ranks of the next start may load, before it starts them.

A process of its own does it, since the file system may hang, and a copy takes long (slurmddp/records/next_save.py).
"""

import json
import os
import signal
import time
from typing import Any, Callable, Iterator, Sequence

from slurmddp.records import json_lines, next_save
from slurmddp.records.cause import Cause
from slurmddp.records.events import NAMES, Event, parse
from slurmddp.supervisor.job import Job

#: The variable with which the ranks add train.resume_args.
CHECKPOINT = "SLURMDDP_CHECKPOINT"
#: Seconds for the search and the copy together.
MOST = 150.0


def choose_save(job: Job, look: Callable[[], Any]) -> bool:
    """Choose the save for the attempt that comes. look: called meanwhile. Return whether the ranks may start."""
    saves = json.loads(job.values.words["saves"] or "null")
    if saves is None:  # each start of torchrun's agents chooses for itself
        return True
    answer = job.logs + "/next_save"
    hosts = job.values.watched()
    places = next_save.Places(job.run, hosts, saves["earlier"])
    words = [str(job.attempt), job.scheduler.host, json.dumps(places), answer]
    child = job.loop.start([*job.values.program("save"), *words], heeds="tool")
    end = time.monotonic() + MOST
    while child.code is None and not job.must_end() and time.monotonic() < end:
        look()
        job.loop.run_until(lambda: child.code is not None, 1)
    code = child.code
    child.kill(signal.SIGKILL)
    choice = json_lines.load((job.folder.known(None, "read", answer) or "").encode("utf-8", "surrogateescape"))
    if choice is not None:
        job.env[CHECKPOINT] = _inside(str(choice["checkpoint"]), hosts, saves["watch"])
        return True
    job.env[CHECKPOINT] = ""
    if job.must_end():
        return True
    how = "no answer within {:.0f} s".format(MOST) if code is None else "exit code {}".format(code)
    text = "could not find out the newest save of the script ({})".format(how)
    job.say(text)
    if saves["needed"]:  # without its arguments, the script might begin at step 1 and write over the save
        job.exit_code, job.watch.noted = 1, Cause(text)
    return not saves["needed"]


def _inside(path: str, hosts: Sequence[str], insides: Sequence[str]) -> str:
    """Return where the container has what lies here on the host: as far as checkpoint.watch is elsewhere in there."""
    for number, host in enumerate(hosts):
        here, there = host.split("/"), insides[number].split("/")
        while here and there and here[-1] == there[-1]:
            here.pop()
            there.pop()
        before = "/".join(here)
        if before and (path + "/").startswith(before + "/"):
            return "/".join(there) + path[len(before) :]
    return path


def main(arguments: Sequence[str]) -> int:
    """ATTEMPT NODE PLACES ANSWER: write {checkpoint} to the file ANSWER, and events into the run folder."""
    attempt, node, places_text, answer = arguments
    places = next_save.Places(*json.loads(places_text))
    log = os.path.join(places.run, "events.jsonl")

    def write(facts: Any) -> None:
        json_lines.append(log, json_lines.dump(Event(facts, time.time(), int(attempt), node=node).write()))

    checkpoint = next_save.before_start(places, _events(log), write)
    part = answer + ".part"
    with open(part, "wb") as file:
        file.write(json_lines.dump({"checkpoint": checkpoint}))
    os.rename(part, answer)
    return 0


def _events(log: str) -> Iterator[Event]:
    """Yield the events that decide. Most lines are of other ones: to parse them all takes long."""
    words = ['"{}"'.format(NAMES[kind]).encode() for kind in next_save.KINDS]
    try:
        with open(log, "rb") as file:
            for line in file:
                event = parse(line) if any(word in line for word in words) else None
                if event is not None and isinstance(event.facts, next_save.KINDS):
                    yield event
    except FileNotFoundError:
        return
