"""What `slurmddp check JOB.yaml` found, for people."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from slurmddp.report.check import total
from slurmddp.styled import labelled
from slurmddp.visible import one_line


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield each finding of `as_dict` as `WHERE: severity: message [rule]` with its fix, then the counts."""
    explained: set[str] = set()
    for each in found["findings"]:
        where = f"{one_line(each['where'])}: " if each["where"] else ""
        yield where + labelled(each["severity"], f"{one_line(each['message'])} [{each['rule']}]")
        if each["rule"] not in explained:
            explained.add(each["rule"])
            yield f"    why: {each['reason']}"
            yield f"    see: {each['source']}"
        if each["fix"]:
            yield f"    fix: {one_line(each['fix'])}"
    if found["script"]:
        yield from _script_lines(found["script"])
    for offer in found["partitions"] or ():
        when = offer["start"] or (one_line(offer["refusal"]) if offer["refusal"] else "Slurm does not say when")
        yield f"partition {offer['partition']:<16} {when}"
    for why in found["not_checked"]:
        yield f"not checked: {one_line(why)}"
    for what in found["depends_on"]:
        yield f"not checked, the job depends on it: {one_line(what)}"
    start = f"; Slurm would start it at {found['start']}" if found["start"] else ""
    yield f"job {found['job']}, {found['rules']} rules: {total(found['counts'])}{start}"


def _script_lines(script: dict[str, Any]) -> Iterator[str]:
    """Yield what the user's program does not do, what is proposed for the job file, and what is not known."""
    name = one_line(script["script"].rpartition("/")[2])
    for each in script["sentences"]:
        yield f"{one_line(each['where']) or name}: " + labelled("note", f"the script {one_line(each['text'])}")
        if each["todo"]:
            yield f"    fix: {each['todo']}"
    for each in script["proposals"]:
        value = json.dumps(each["value"])
        yield f"{name}: " + labelled("note", f"proposed for the job file: {each['key']}: {one_line(value)}")
        yield f"    why: {one_line(each['why'])}"
    for each in script["not_read"]:
        yield f"not read: {one_line(each['name'])}: {one_line(each['why'])}"
    unknown = [fact for fact, answer in script["facts"].items() if answer["answer"] == "cannot tell"]
    if unknown:
        yield f"{name}: cannot tell from its text: {', '.join(unknown)}"
