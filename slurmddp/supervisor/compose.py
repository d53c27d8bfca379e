"""What an alert says to one receiver: the payload file of a target, whose slots are filled with facts.

docs/alerts.md describes payloads. Facts come from logs, so they may hold anything: no control characters, no colours
and no secrets leave here.
"""

import hashlib
import json
import re
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from slurmddp.records.alert import Alert, Message, is_header
from slurmddp.records.redact import redact
from slurmddp.records.text import UNSAFE

#: Bytes at the end of a log that are looked at; of a longer log, the first are dropped: they may hold half a secret.
LOG_BYTES, _DROPPED = 65536, 2048
_LOG_LINES = 15
#: Characters of a secret of which a text with more spaces or line breaks is searched; of one that is told by its start.
_SHORTEST, _START = 6, 64
_COLOURS = re.compile("\x1b\\[[0-?]*[ -/]*[@-~]|\x1b\\][^\x07\x1b]*(?:\x07|\x1b\\\\)|\x1b[ -~]")
_SLOT = re.compile(r"@(\w+)(?::(\w+))?@")
_LEFT_OUT = "[left out: it holds the address of an alert]"


class Composed(NamedTuple):
    """A message, and its way: leave is node, proxy or login; proxy an address, or empty."""

    message: Message
    leave: str
    proxy: str


def plain(text: str) -> str:
    """Return valid text without control characters (but line breaks and tabs) and colours."""
    valid = text.encode("utf-8", "ignore").decode("utf-8").replace("\0", "").replace("\r", "\n")
    return UNSAFE.sub("", _COLOURS.sub("", valid))


def redacted(text: str, secrets: Sequence[str]) -> str:
    """Return a text without secrets: nothing of it, if a log has broken one into lines."""
    text = _replaced(text, secrets)
    joined = "".join(text.split())
    bare = ("".join(secret.split()) for secret in secrets)
    return _LEFT_OUT if any(len(secret) >= _SHORTEST and secret in joined for secret in bare) else text


def _replaced(text: str, secrets: Sequence[str]) -> str:
    """Return a text without secrets that stand in it as they are, and without the starts of long ones."""
    for secret in secrets:
        text = text.replace(secret, "[secret]")
    for start in {secret[:_START] for secret in secrets if len(secret) > _START}:
        text = re.sub(re.escape(start) + r"\S*", "[secret]", text)
    return text


def first(text: str, size: int) -> str:
    """Return the first bytes of a text."""
    data = text.encode("utf-8")
    return text if len(data) <= size else data[:size].decode("utf-8", "ignore") + "..."


def last(text: str, size: int) -> str:
    """Return the last bytes of a text, from the start of a line if there is one."""
    data = text.encode("utf-8")
    if len(data) <= size:
        return text
    cut = data[len(data) - size :].decode("utf-8", "ignore")
    return cut.partition("\n")[2] if "\n" in cut else cut


def end_of_log(data: bytes, whole: bool, secrets: Sequence[str]) -> str:
    """Return the last lines of a log. data: its last LOG_BYTES; whole: they are all of it."""
    # Searched before anything is cut: a secret must be seen whole. What is dropped may be the rest of one.
    text = redact(_replaced(plain(data.decode("utf-8", "ignore")), secrets))
    text = text if whole else text[_DROPPED + max(map(len, secrets), default=0) :]
    lines = [line for line in text.split("\n") if line.strip()][-_LOG_LINES:]
    text = redacted("\n".join(_cut(line, 4096) for line in lines), secrets)
    return last("\n".join(_cut(line, 300) for line in text.split("\n")), 4500)


def safe(alert: Alert, secrets: Sequence[str]) -> Alert:
    """Return an alert whose texts may be shown, each in one line and not too long. Its log_tail is left as it is."""

    def line(text: str, size: int) -> str:
        return first(redact(redacted(re.sub("[\n\t]", " ", plain(text[:16384])), secrets)), size)

    return alert._replace(
        state=line(alert.state, 120), cause=line(alert.cause, 600), next=line(alert.next, 400),
        folder=line(alert.folder, 4096), log=line(alert.log, 4096),
        rank=alert.rank if alert.rank is not None and 0 <= alert.rank < 10**9 else None,
        node=alert.node if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", alert.node) else "",
    )  # fmt: skip


def compose(target: str, payload: str, alert: Alert) -> Optional[Composed]:
    """Return the message of a payload; None if the target does not want this kind of alert. alert: from `safe`."""
    options = {"leave": "node", "proxy": "", "insecure": "0"}
    filler = _Filler(_facts(alert))
    is_subscribed = False
    headers: List[str] = []
    body: List[str] = []
    for line in payload.split("\n"):
        word, _, rest = line.partition(" ")
        if word == "on" and rest.partition(" ")[0] == alert.kind:
            is_subscribed = True
            _, filler.facts["priority"], filler.facts["verb"] = (*rest.split(" ", 2), "", "")[:3]
        elif word in options:
            options[word] = rest
        elif word == "escape":
            filler.escape = rest
        elif word == "bytes":
            filler.room = int(rest)
        elif word == "header":
            headers.append(filler.fill(rest)[0])
        elif word in ("part", "optional"):
            text, whole = filler.fill(rest)
            body.append(text if whole or word == "part" else "")
        elif word == "each":
            for filler.facts["line"] in alert.log_tail.split("\n"):
                text, whole = filler.fill(rest)
                body.append(text if whole else "")
    if not is_subscribed:
        return None
    sent = tuple(header for header in headers if is_header(header))
    message = Message(target, alert.key, alert.kind, options["insecure"] == "1", sent, "".join(body).encode("utf-8"))
    return Composed(message, options["leave"], options["proxy"])


def way(payload: str) -> Tuple[str, str]:
    """Return from where the messages of a target leave, and its proxy."""
    words = dict(line.partition(" ")[::2] for line in payload.split("\n"))
    return words.get("leave", "node"), words.get("proxy", "")


class _Filler:
    """Fills slots. room: how many bytes of facts still fit, for the slots @FACT:rest@."""

    def __init__(self, facts: Dict[str, str]) -> None:
        self.facts = facts
        self.escape = ""
        self.room = 0

    def fill(self, template: str) -> Tuple[str, bool]:
        """Return a template with its facts, and whether none of them is empty. No fact is filled again."""
        whole = True

        def value(slot: "re.Match[str]") -> str:
            nonlocal whole
            size = slot.group(2) or ""
            text = self.facts.get(slot.group(1), "")
            if size.isdigit():
                text = first(text, int(size))
            elif size == "rest":
                text = last(text, self.room) if self.room >= 80 else ""
            whole = whole and bool(text)
            self.room -= len(text.encode("utf-8"))
            if size in ("text", "number") and not text:
                return "null"
            text = self._escaped(text)
            return f'"{text}"' if size == "text" else text

        if "json" not in self.escape:
            template = re.sub(r"\\(u[0-9a-fA-F]{4}|.)", _character, template)  # \n is a line break there, too
        return _SLOT.sub(value, template), whole

    def _escaped(self, text: str) -> str:
        if "backtick" in self.escape:
            text = text.replace("`", "'")
        if "html" in self.escape:
            text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return json.dumps(text, ensure_ascii=False)[1:-1] if "json" in self.escape else text


def _character(match: "re.Match[str]") -> str:
    r"""Return what an escape of a template stands for, as in JSON; an unknown one stays."""
    escape = match.group()
    return str(json.loads(f'"{escape}"')) if escape[1] in '"\\/nt' or len(escape) == 6 else escape


def _facts(alert: Alert) -> Dict[str, str]:
    facts = {name: "" if value is None else str(value) for name, value in alert.write().items()}
    progress = "no step yet"
    if alert.step is not None:
        progress = f"step {alert.step}" + (f" of {alert.steps}" if alert.steps is not None else "")
        progress += f" ({100 * alert.step // alert.steps} %)" if alert.steps else ""
    digest = hashlib.sha256(alert.key.encode("utf-8", "surrogateescape")).hexdigest()
    return dict(facts, progress=progress, job=alert.job_id or "?", key_hash=digest[:32])


def _cut(line: str, size: int) -> str:
    return line.encode("utf-8")[:size].decode("utf-8", "ignore")
