"""What alerts say, in each service's form: one payload file per target, whose slots are filled on the node.

A payload has a word and its value per line: options, headers, then the parts of the body. A slot is @FACT@ or
@FACT:FORMAT@: slurmddp/supervisor/compose.py fills them. A part that is `optional` is left out if one of its facts is
empty. Facts are escaped there; all other text is escaped here.
"""

import json
import re

from slurmddp.job.plan.model import AlertsPlan, AlertTarget, Plan

#: Kind of alert -> its priority for ntfy (3: normal), and what the title says after the job's name.
_VERBS = {
    "started": (2, "has started"),
    "requeued": (3, "was requeued"),
    "recovered": (3, "has recovered"),
    "hang": (4, "hangs"),
    "straggler": (3, "is slowed down by a node"),
    "warning": (4, "has a warning"),
    "stopping": (3, "is stopping"),
    "failed": (4, "has FAILED"),
    "finished": (3, "has finished"),
}
_COMMAND = "slurmddp status @run@; slurmddp logs @run@"
_SLOT = re.compile(r"@\w+(?::\w+)?@")
_IS_JSON = "header Content-Type: application/json"
_BODY = "BODY"  # stands in a JSON value where the parts go

#: The word (part, optional or each), and the text with slots.
_Part = tuple[str, str]


def payload(plan: Plan, alerts: AlertsPlan, target: AlertTarget) -> str:
    """Return the payload file of one target."""
    options = [
        *(f"on {kind} {priority} {verb}" for kind, (priority, verb) in _VERBS.items() if kind in target.on),
        f"leave {alerts.leave}",
        *([f"proxy {plan.site.alerts.proxy}"] if plan.site.alerts.proxy else []),
        f"insecure {int(target.insecure)}",
    ]
    form = _FORMS.get(target.to, _json)(plan)
    return "".join(f"{line}\n" for line in (*options, "header Idempotency-Key: @key@", *form))


def _json(plan: Plan) -> list[str]:
    """The message for programs; docs/alerts.md is its schema."""
    message = {
        "schema": 1,
        "key": "@key@",
        "kind": "@kind@",
        "time": "@time:number@",
        "site": plan.site.name,
        "job": plan.job.name,
        "job_id": "@job_id:text@",
        "run": "@run@",
        "folder": "@folder@",
        "attempt": "@attempt:number@",
        "state": "@state:text@",
        "step": "@step:number@",
        "steps": "@steps:number@",
        "cause": "@cause:text@",
        "node": "@node:text@",
        "rank": "@rank:number@",
        "next": "@next:text@",
        "command": _COMMAND,
        "log": "@log:text@",
        "log_tail": "@log_tail@",
    }
    text = re.sub(r'"(@\w+:(?:text|number)@)"', r"\1", json.dumps(message))  # these bring their quotes, or are null
    return ["escape json", _IS_JSON, f"part {text}"]


def _slack(plan: Plan) -> list[str]:
    body = {"text": _BODY, "unfurl_links": False, "unfurl_media": False}
    return ["escape backtick html json", _IS_JSON, *_limited(3000, _lines(plan, bold="*", quote="`"), body)]


def _discord(plan: Plan) -> list[str]:
    """At most 1900 of 2000 characters; mentions nobody, and shows no preview of links (flag 4)."""
    body = {"content": _BODY, "allowed_mentions": {"parse": []}, "flags": 4}
    return ["escape backtick json", _IS_JSON, *_limited(1900, _lines(plan, bold="**", quote="`"), body)]


def _teams(plan: Plan) -> list[str]:
    """An Adaptive Card of text runs, which know no markup. Each line has its own, since a run has no line breaks."""
    title = _block(f"{plan.job.name} @verb@", {}, {"weight": "Bolder", "size": "Medium"})
    small = {"fontType": "Monospace", "size": "Small"}
    begin, end = json.dumps(_block(_BODY, {"spacing": "Small"}, {})).split(_BODY)
    parts = [
        ("part", json.dumps(title)),
        ("part", f", {begin}job @job:40@ at {plan.site.name}, attempt @attempt@"),
        ("optional", ", @state@"),
        ("part", f", @progress@{end}"),
        *(("optional", f", {begin}{text}{end}") for text in ("cause: @cause@", "next: @next@", "run: @folder@")),
        ("part", f", {begin}more: {_COMMAND}{end}"),
        ("each", ", " + json.dumps(_block("@line@", {"spacing": "None"}, small))),
    ]
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "msteams": {"width": "Full"},
        "body": [_BODY],
    }
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None, "content": card}
    first, last = json.dumps({"type": "message", "attachments": [attachment]}).split(f'"{_BODY}"')
    lines = [f"{word} {text}" for word, text in (("part", first), *parts, ("part", last))]
    return ["escape json", _IS_JSON, *lines]


def _ntfy(plan: Plan) -> list[str]:
    """Plain text of at most 3800 of 4096 bytes, and headers. A message with the id of an earlier one replaces it."""
    parts = _lines(plan, cause="cause", following="next", folder="folder:400")
    headers = [
        "Content-Type: text/plain; charset=utf-8",
        f"Title: {plan.job.name} @verb@",
        "Priority: @priority@",
        "Tags: slurmddp,@kind@",
        "X-Sequence-ID: @key_hash@",
    ]
    return [*(f"header {header}" for header in headers), *_limited(3800, parts)]


_FORMS = {"slack": _slack, "discord": _discord, "teams": _teams, "ntfy": _ntfy}


def _lines(
    plan: Plan,
    *,
    bold: str = "",
    quote: str = "",
    cause: str = "cause:400",
    following: str = "next:250",
    folder: str = "folder:300",
) -> list[_Part]:
    """A message that is one text. bold: around its title, which ntfy has in a header; quote: around each line, which
    makes it literal; cause, following, folder: slots."""
    log = "\n```\n@log_tail:rest@\n```" if quote else "\n\n@log_tail:rest@"
    return [
        ("part", f"{bold}{plan.job.name} @verb@{bold}\n" if bold else ""),
        ("part", f"{quote}job @job:40@ at {plan.site.name}, attempt @attempt@"),
        ("optional", ", @state@"),
        ("part", f", @progress@{quote}"),
        ("optional", f"\n{quote}cause: @{cause}@{quote}"),
        ("optional", f"\n{quote}next: @{following}@{quote}"),
        ("part", f"\n{quote}run: @{folder}@{quote}"),
        ("part", f"\n{quote}more: {_COMMAND}{quote}"),
        ("optional", log),
    ]


def _limited(size: int, parts: list[_Part], frame: object = None) -> list[str]:
    """Parts of one text, of `size` bytes at most with its facts; frame: the JSON value around it, if any."""
    begin, end = json.dumps(frame).split(_BODY) if frame else ("", "")
    constant = sum(len(_SLOT.sub("", text)) for _, text in parts)
    lines = [(word, json.dumps(text)[1:-1]) for word, text in parts]  # a line break becomes \n, for plain text as well
    around = [("part", begin), *lines, ("part", end)]
    return [f"bytes {size - constant}", *(f"{word} {text}" for word, text in around if text)]


def _block(text: str, block: dict[str, str], run: dict[str, str]) -> dict[str, object]:
    return {"type": "RichTextBlock", **block, "inlines": [{"type": "TextRun", "text": text, **run}]}
