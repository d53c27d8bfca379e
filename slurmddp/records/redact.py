"""Secrets in texts of others, such as logs: how each kind looks, and the text without them.

What is told about a failure comes from logs, and goes to events, alerts, `status` and the bundle for support.
"""

import re
from functools import lru_cache
from typing import AnyStr, Iterable, Match, NamedTuple, Pattern, Tuple

REDACTED = "[redacted]"


class Kind(NamedTuple):
    """Credentials of one kind.

    hints: how `pattern` begins, in lower case: it is tried there only, which is quick; "" is the file's beginning.
    distinct: different characters that a random value has at least.
    """

    name: str
    hints: Tuple[bytes, ...]
    source: bytes
    flags: int
    distinct: int

    @property
    def pattern(self) -> Pattern[bytes]:
        """Return the pattern, whose last group is the value. Compiled where a text has a hint: most have none."""
        return re.compile(self.source, self.flags)


def _kind(name: str, hints: str, pattern: str, distinct: int = 10, flags: int = re.MULTILINE) -> Kind:
    return Kind(name, tuple(hint.encode() for hint in hints.split(" ")), pattern.encode(), flags, distinct)


_START, _END = r"(?<![A-Za-z0-9_+=.-])", r"(?![A-Za-z0-9_/+=-])"
_LINE = r"(?<![^\n])"
#: What surely is a secret, also in a project's files.
KINDS = (
    _kind(
        "private key",
        "-----begin",
        r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----(?:\s|\\n|[A-Za-z-]+: [^\n]*\n)*"
        r"((?:[A-Za-z0-9+/=]|\s|\\n){60,})",
        20,
    ),
    _kind("PuTTY key", "", r"\APuTTY-User-Key-File-(\d)", 0),
    _kind("age key", "age-secret-key-1", r"AGE-SECRET-KEY-1([A-Z0-9]{50,})"),
    _kind("WireGuard key", "privatekey", r"PrivateKey\s*=\s*([A-Za-z0-9+/]{43}=)"),
    _kind(
        "registry login",
        '"auths"',
        r'"auths"\s*:\s*\{[^$]*?"(?:auth|identitytoken)"\s*:\s*"([A-Za-z0-9+/=._-]{12,})"',
        8,
    ),
    _kind("Kubernetes login", "client-key-data", r"client-key-data\"?\s*:\s*\"?([A-Za-z0-9+/=]{16,})"),
    _kind("Google login", "refresh_token", r'refresh_token"?\s*[:=]\s*"?(?=(?:[^\s"]*\d){3})([A-Za-z0-9/_.-]{20,})'),
    _kind("Kaggle key", '"username"', r'"username"\s*:\s*"[^"]+"\s*,\s*"key"\s*:\s*"([0-9a-f]{32})"', 8),
    _kind("API key", '"key"', r'"key"\s*:\s*"([0-9a-f]{32})"\s*,\s*"email"', 8),
    _kind("GitHub token", "ghp_ gho_ ghu_ ghs_ ghr_", _START + r"gh[pousr]_([A-Za-z0-9]{36,})"),
    _kind("GitHub token", "github_pat_", r"github_pat_(\w{40,})"),
    _kind("GitLab token", "glpat-", _START + r"glpat-([\w-]{20,})"),
    _kind("Hugging Face token", "hf_", _START + r"hf_([A-Za-z0-9]{30,})" + _END),
    _kind("API key", "sk-", _START + r"sk-((?:[a-z]+[0-9]*-)*[A-Za-z0-9_-]{32,})", 14),
    _kind("AWS key", "akia asia", r"(?<![A-Za-z0-9_/+=.-])A(?:KIA|SIA)([A-Z2-7]{16})" + _END, 8),
    _kind("Slack token", "xox", r"xox[abeprs]-([0-9A-Za-z-]{20,})"),
    _kind("webhook", "hooks.slack.com", r"hooks\.slack\.com/services/T\w+/B\w+/(\w{20,})"),
    _kind("webhook", "discord", r"discord(?:app)?\.com/api/webhooks/\d+/([\w-]{50,})"),
    _kind("wandb key", "wandb_v1_", r"wandb_v1_(\w{40,})"),
    _kind("PyPI token", "pypi-ageichlwa", r"pypi-AgEIcHlwa([\w-]{40,})"),
    _kind("npm token", "npm_", _START + r"npm_([A-Za-z0-9]{36})"),
    _kind("Google key", "aiza", _START + r"AIza([\w-]{35})"),
    _kind("NVIDIA key", "nvapi-", r"nvapi-([\w-]{40,})"),
    _kind("Docker token", "dckr_pat_", r"dckr_pat_([\w-]{20,})"),
    _kind("API key", "gsk_ dop_v1_ r8_ dapi", _START + r"(?:gsk_|dop_v1_|r8_|dapi)([A-Za-z0-9]{32,})"),
    _kind("Azure key", "accountkey=", r"AccountKey=([A-Za-z0-9+/=]{60,})", flags=re.IGNORECASE),
    _kind("conda token", "/t/", r"/t/[a-z]{2}-([0-9a-f-]{36})/", 8),
    _kind("password in an address", "://", r"://[^/\s:@\"'<>]+:([^/\s:@\"'<>{}$()]{8,})@[\w.-]+", 7),
    _kind("password of PostgreSQL", "", r"\A(?:#[^\n]*\n)*[\w.*-]+:(?:\d{4,5}|\*):[^:\s]+:[^:\s]+:([^:\s]+)\s*$", 4),
    _kind("password", "<password>", r"<password>([^<{$\s]{6,})</password>", 5),
    _kind(
        "password",
        "[pypi] [testpypi] [server-login] [client]",
        r"\[[a-z-]+\][ \t]*\n(?:[^\[\n]*\n)*?password\s*[=:]\s*(\S{6,})",
        5,
    ),
    _kind(
        "login of rclone",
        "type",
        _LINE + r"type\s*=\s*\w+\n(?:[^\[\n]*\n)*?(?:pass|token|secret_access_key|client_secret)\s*=\s*(\S{16,}.*)",
    ),
    _kind("cookies", "", r"\A# (?:Netscape )?HTTP Cookie File((?:\n#.*|\n\s*)*\n[^\s#])", 0),
    _kind("API key", "key:", _LINE + r"key:\s*((?:\d+:)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\s*$", 8),
    # A name that says what it is, with a value as only machines make it, in quotes or up to the end of its line
    _kind(
        "secret",
        "api_key api-key apikey token secret password passwd access_key accesskey",
        r"(?:api[_-]?key|token|secret[_-]?key|secret|passw(?:or)?d|access[_-]?key)"
        r"(?:[\"']\s*[:=]\s*[\"']?|\s*[:=]\s*[\"']?)(?=[^\s\"'0-9]*(?:\d[^\s\"'0-9]*){4})"
        r"([A-Za-z0-9_+/=.~-]{20,})(?=[\"']|[ \t]*,?$)",
        11,
        re.MULTILINE | re.IGNORECASE,
    ),
)

_SECRET = re.compile(r"(?:.*_)?(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|SECRET_KEY|SECRET_ACCESS_KEY)")
#: A token of a text, which language models are trained on, and units such as dollars per token.
_OF_TEXT = re.compile(
    r"(?:.*_)?(?:PAD|PADDING|EOS|BOS|EOT|UNK|MASK|SEP|CLS|STOP|START|BEGIN|END|FIRST|LAST|NEXT|NEW|PREV|SPECIAL|PER"
    r"|IMAGE|IMG|VIDEO|AUDIO|SPEECH|VISION|TEXT|PROMPT|THINK|TOOL|DECODER_START)_TOKEN"
)
#: Names that a job may have for other things: in a text of others, a value with a digit is hidden.
_PERHAPS = re.compile(
    r"(?:.*_)?(?:PASSPHRASE|CREDENTIALS?|WEBHOOK|[A-Z]+_(?:PASS|PWD)|AUTH"
    r"|(?:ACCESS|PRIVATE|AUTH|ACCOUNT|ENCRYPTION|SIGNING|ROUTING|INTEGRATION|MASTER|SSH|KAGGLE|SHARED_ACCESS)_?KEY)"
)
#: Values that nobody has to hide: flags, and nothing at all.
HARMLESS = frozenset(("", "true", "false", "yes", "no", "on", "off", "none", "null", "0", "1"))
#: Values that stand for one: a variable, a type or an expression of code, "not set".
_STANDS_FOR_ONE = re.compile(
    r"(?i)[$`<*]|\\?[\"']?$|(?:true|false|none|null|not?|unset|missing|required|invalid|expired|empty)\b"
    r"|(?:str|bytes|bool|int|float|Optional|Union|Any)\b|(?:os|self|args|cfg|config|opts?|getpass|settings)[.(\[]"
)
#: NAME="some words", and NAME: some words, up to the end of the line; an option with its value: in a shell, in YAML's
#: lists, in JSON; NAME=value, NAME:value in one word; setenv NAME value, and NAME value in a table.
_ASSIGNED = r"(?<![A-Za-z_])([A-Za-z_][\w-]{0,200})"
_QUOTED = re.compile(_ASSIGNED + r"(\\?[\"']?\]?\s{0,9}(?:=>|[=:])\s{0,9}[bru]?)(\"(?:\\.|[^\"\\\n])*\"|'[^'\n]*')")
_REST = re.compile(_ASSIGNED + r"([\"']?\]?[ \t]*[:=][ \t]+)([^\s\"',{}\[\]][^\n]*)")
_OPTION = re.compile(
    r"(?<![\w-])(-{1,2}[A-Za-z][\w-]*)([\"',]*\s+(?:-\s+)?)(?!-)(\"[^\"\n]*\"|'[^'\n]*'|[\"']?[^\s\"',\]]+)"
)
_PAIR = re.compile(_ASSIGNED + r"([\"']?\s{0,9}[=:]\s{0,9}[\"']?)([^\s,;&{}\[\]\"']+)")
_SETENV = re.compile(r"\b(?<=setenv )([A-Za-z_]\w*)([ \t]+)(\S+)|\b(?<=set -x )([A-Za-z_]\w*)([ \t]+)(\S+)")
_COLUMN = re.compile(r"(?<!\S)([A-Z][A-Z_]*)([ \t]+)((?=[^\s\d]*\d)[\w+/=.-]{12,})(?!\S)")
_WORD = re.compile(r"\S+")
#: Pairs within the value of a pair; what is behind more of them is hidden.
_DEEPEST = 20
#: Searches in a line take the square of its length.
_LONG_LINE = re.compile(r"[^\n]{8192,}")


@lru_cache(maxsize=None)
def _in_logs() -> Tuple[Pattern[str], ...]:
    """Return what is a secret in the text of a program: its last group is hidden. Compiled once, where it is needed."""
    key, value = r"-----%s [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----", r"[\"']?([^\s\"']+)"
    return tuple(re.compile(pattern) for pattern in (
        f"{key % 'BEGIN'}(?:\\\\n|\\s)*([^$]{{1,20000}}?)(?=(?:\\\\n|\\s)*(?:[^\\n]{{1,80}} )?{key % 'END'})",
        # the end of a private key whose beginning was cut off
        r"(?<![A-Za-z0-9+/=])((?:[A-Za-z0-9+/=]{16,}\s{1,9}){1,99})(?=-----END [A-Z0-9 ]*PRIVATE KEY)",
        r"(?<=://)([^/\s\"'<>]+)@(?!sha256:)",
        r"(?i)\b(?:authorization|(?:set-)?cookie)[\"']?\s*[:=]\s*[\"']?((?!none\b)[^\s\"'][^\"'\n]+)",
        r"(?i)\bbearer\s+(?=\S*\d|\S{20})([^\s\"',]{6,})",
        r"\bmachine\s+\S+\s+(?:(?:login|user|account)\s+\S+\s+){0,2}password\s+(\S+)",
        r"\b(?:curl|wget)\b[^\n]{0,500}?\s(?:-u|--user|--proxy-user)[ =][\"']?[^\s:\"']+:([^\s\"']+)",
        r"\b(?:sshpass|(?:docker|podman|registry|helm) login)\b[^\n]{0,300}?\s-p\s*" + value,
        r"\bmysql\w*\s[^\n]{0,300}?(?<=\s)-p([^\s\"']{4,})",
        r"\bwandb login\s[^\n]{0,200}?\b([0-9a-f]{40})\b",
        r"\becho\s+(?:-n\s+)?" + value + r"[\"']?\s*\|[^|\n]{0,200}--(?:password-stdin|with-token)",
        # addresses that whoever knows them may use
        r"[?&;](?i:[\w-]*(?:sig|signature|credential|token|secret|password|api_?key))=([^\s&\"'<>#]{6,})",
        r"(?:hooks\.slack\.com/\w+|webhook\.office\.com/webhookb2|/hooks|api\.telegram\.org)/([\w@/:-]{20,})",
        # tokens that are told by how they begin
        r"(?<![A-Za-z0-9])(eyJ[\w-]{10,}(?:\.[\w-]*){2,4})",
        r"(?<![A-Za-z0-9_])(?:AIza|xapp-|ya29\.|GOCSPX-|SG\.|[rs]k_(?:live|test)_|hv[sb]\.|shpat_|xai-|pplx-|tgp_v1_|rpa_"
        r"|lin_api_|ATATT|tk_(?=[a-z0-9]{29}\b))([\w.-]{16,})",
    ))  # fmt: skip


def is_secret_name(name: str) -> bool:
    """Return whether a variable, an option or a key of this name holds a secret: HF_TOKEN, --api-key, apiKey."""
    text = normal_name(name)
    return _SECRET.fullmatch(text) is not None and _OF_TEXT.fullmatch(text) is None


def normal_name(name: str) -> str:
    """Return HF_TOKEN for --hf-token, hub.hfToken and HF_TOKEN."""
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip("-+~"))
    return re.split(r"[./:@]", text)[-1].replace("-", "_").upper()


def without_kinds(text: str) -> str:
    """Return a text without what looks like credentials of a kind: rather too little of it than one of them."""
    data = text.encode("utf-8", "replace")  # half of a UTF-16 pair is no text
    for kind in KINDS:
        lower = data.lower()
        if not any(hint in lower for hint in kind.hints):
            continue
        if kind.distinct == 0 and kind.pattern.search(data):
            return f"[redacted: {kind.name}]\n"
        data = kind.pattern.sub(lambda match: _last_group_hidden(match, REDACTED.encode()), data)
    text = data.decode("utf-8")
    for expression in _in_logs():
        text = expression.sub(lambda match: _last_group_hidden(match, REDACTED), text)
    return text


def redact(text: str, known: Iterable[str] = ()) -> str:
    """Return a text without secrets. known: values that are hidden wherever they stand, the longest first."""
    for value in known:
        text = text.replace(value, REDACTED)
    text = without_kinds(_LONG_LINE.sub(lambda match: f"[a line of {len(match[0])} characters]", text))
    for pattern in (_QUOTED, _REST, _OPTION, _SETENV, _COLUMN):
        text = pattern.sub(_value_hidden, text)
    return _WORD.sub(lambda match: hide_pairs(match[0]) if "=" in match[0] or ":" in match[0] else match[0], text)


def _last_group_hidden(match: Match[AnyStr], by: AnyStr) -> AnyStr:
    group = match.lastindex or 0
    start, end = match.start(group) - match.start(), match.end(group) - match.start()
    return match[0][:start] + by + match[0][end:]


def _value_hidden(match: Match[str]) -> str:
    name, _, value = [group for group in match.groups() if group is not None]
    return match[0][: -len(value)] + REDACTED if _is_secret(name, value) else match[0]


def _is_secret(name: str, value: str) -> bool:
    value = value.strip("\"'")
    if value.lower() in HARMLESS or _STANDS_FOR_ONE.match(value) or value.startswith(REDACTED):
        return False
    if is_secret_name(name):
        return not (value.isdigit() and len(value) < 7)  # the number of a token
    first = value.split()[0]
    is_random = len(first) > 5 and first[0] not in "/~." and any(map(str.isdigit, first))
    return is_random and _PERHAPS.fullmatch(normal_name(name)) is not None


def hide_pairs(text: str, depth: int = 0) -> str:
    """Return a word without the values of secrets: NAME=value, NAME:value, --set=environment.NAME=value."""

    def hide(match: Match[str]) -> str:
        name, between, value = match.groups()
        hidden = _is_secret(name, value) or depth == _DEEPEST
        return name + between + (REDACTED if hidden else hide_pairs(value, depth + 1))

    return _PAIR.sub(hide, text)
