"""What `status` says of the saves that a script's next start may have written over."""

import pytest

from slurmddp.run.rank_starts import heartbeat_notices, pause_notices, start_notices, without_notices
from tests.helpers import typed

ZERO = {"event": "restarted", "how": "from zero", "step": 1, "before": 9, "lost": 9, "text": "began again"}
ON = {"event": "restarted", "how": "went on", "step": 10, "before": 9, "text": "the script went on at step 10"}
KEPT = {"event": "save_kept", "path": "/out/last.pt", "kept": "/run/kept/001-last.pt", "bytes": 9, "why": ""}
REFUSED = {**KEPT, "kept": "", "why": "disk full"}
NO_COPY = "the script may write over /out/last.pt, of which there is no copy: disk full"


@pytest.mark.parametrize(
    ("records", "notices"),
    [
        ((KEPT, ZERO), ("began again; what it had saved is kept in /run/kept/001-last.pt",)),
        ((KEPT, ON), ()),
        ((KEPT,), ()),
        ((REFUSED,), (NO_COPY,)),
        ((REFUSED, ZERO), ("began again", NO_COPY)),
        ((REFUSED, ON), ()),
        ((ZERO,), ("began again",)),
    ],
)
def test_copies_are_named_where_a_script_began_again(records: tuple[dict, ...], notices: tuple[str, ...]) -> None:
    assert start_notices(typed({"event": "rank_started"}, *records)) == notices


def test_the_longest_pause_of_each_agent_is_told() -> None:
    pauses = [("node2", 12.0), ("node1", 31.5), ("node2", 40.2)]
    events = typed(*({"event": "agent_paused", "node": node, "seconds": seconds} for node, seconds in pauses))
    assert pause_notices(events) == (
        "the agent on node2 did not run for 40 s: it was stopped (SIGSTOP), or its node hung",
        "the agent on node1 did not run for 32 s: it was stopped (SIGSTOP), or its node hung",
    )


def test_each_reason_for_fresh_ranks_is_told_once_with_its_nodes() -> None:
    told = [("node2", "threads"), ("node1", "threads"), ("node1", "it has ended")]
    events = typed(*({"event": "not_forked", "node": node, "why": why} for node, why in told))
    assert without_notices(events) == (
        "recovery.fork: no forked ranks on node1, node2: threads",
        "recovery.fork: no forked ranks on node1: it has ended",
    )
    why = "there is no libslurm beside scontrol"
    assert without_notices(typed({"event": "no_standby", "node": "node1", "why": why})) == (
        f"recovery.standby: no other node can replace job.sh on node1: {why}",
    )
    assert without_notices(typed({"event": "not_warm", "node": "node1", "why": "it has ended"})) == (
        "recovery.spares_warm: no warm agent on node1: it has ended",
    )
    assert without_notices(typed({"event": "store_open", "node": "node1", "why": "no openssl"})) == (
        "network.store_tls: the store is open to others on node1: no openssl",
    )


def test_nodes_that_send_no_heartbeats_are_told() -> None:
    assert heartbeat_notices(typed({"event": "heartbeats", "nodes": 2, "silent": "", "port": 4000})) == ()
    assert heartbeat_notices(typed({"event": "heartbeats", "nodes": 1, "silent": "n2", "port": 4000})) == (
        "recovery.heartbeats: none from n2 (UDP port 4000): only Slurm reports its loss",
    )
