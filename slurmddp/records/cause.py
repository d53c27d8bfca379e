"""Why an attempt failed: the same facts from the rank or the log to the alert, `status` and --json."""

from typing import Any, Dict, Mapping, NamedTuple, Optional

from slurmddp.records.values import number, whole

#: Kinds. An uncaught exception; a signal that killed a rank; a rank's exit code; ranks that waited for one that did not
#: come; the agent of a node (or, with launch.mode srun, a task); a node; ranks that could not start.
EXCEPTION, SIGNAL, EXIT, HANG, AGENT, NODE, START = "exception", "signal", "exit", "hang", "agent", "node", "start"
#: What the user has to correct: it would be the same on another node.
USER = "user"
#: What ranks see after another rank failed.
CONSEQUENCE = "consequence"
#: The memory or the links of the node's GPU are broken.
GPU = "gpu"
#: Nobody said why; UNKNOWN: what was said is of no known kind.
NOT_FOUND, UNKNOWN = "not found", "unknown"


class Cause(NamedTuple):
    """What is known of a failure, in one line of plain text.

    rank is None and node is empty where nobody knows them. time: unix seconds. log: the file that says it. more: why it
    was the last start.
    """

    text: str
    rank: Optional[int] = None
    node: str = ""
    kind: str = UNKNOWN
    time: Optional[float] = None
    log: str = ""
    more: str = ""

    @property
    def weak(self) -> bool:
        """Return whether it may follow from another failure: it counts only where nothing better is found."""
        return self.kind in (CONSEQUENCE, EXIT)

    def line(self) -> str:
        """Return one line for people, such as `rank 3 on node2: ValueError: boom`."""
        text = f"{self.text}; {self.more}" if self.more else self.text
        if self.rank is None:
            return f"{self.node}: {text}" if self.node else text
        return f"rank {self.rank}{self.node and f' on {self.node}'}: {text}"

    def line_with_log(self) -> str:
        """Return the line, and the file that says it."""
        return f"{self.line()} (in {self.log})" if self.log else self.line()

    def write(self) -> Dict[str, Any]:
        """Return the JSON object, without what is unknown."""
        return {name: value for name, value in self._asdict().items() if value not in (None, "")}


def read(found: Mapping[str, Any]) -> Optional[Cause]:
    """Return what a JSON object says; None without a text. Other parts that are not sound are unknown."""
    text, node, kind, log, more = (str(found.get(key) or "").strip() for key in ("text", "node", "kind", "log", "more"))
    if not text:
        return None
    return Cause(text, whole(found.get("rank")), node, kind or UNKNOWN, number(found.get("time")), log, more)
