"""Which files of a project hold credentials: by their name, and by what their first KiB say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

#: Of each file: credentials stand near the beginning, and a project may have 20,000 files.
_BYTES = 32 * 1024
_FOLDERS = frozenset({".ssh", ".gnupg", ".aws", ".azure", ".oci", ".password-store"})
_NAMES = frozenset((
    ".git-credentials", ".pypirc", ".npmrc", ".pgpass", "kubeconfig", "token.json", ".vault-token", ".s3cfg", ".boto",
    ".my.cnf", ".mylogin.cnf", ".passwd-s3fs", ".smbcredentials", ".xauthority", "access_tokens.db", "credentials.db",
    ".htpasswd", ".dockercfg", "rclone.conf", ".netrc.gpg", "credentials.tfrc.json", ".histfile", ".cdsapirc",
))  # fmt: skip
_PATHS = frozenset((
    ".docker/config.json", ".kube/config", "gh/hosts.yml", ".apptainer/docker-config.json", ".apptainer/remote.yaml",
    ".singularity/docker-config.json", ".singularity/remote.yaml", ".kaggle/kaggle.json", "earthengine/credentials",
    ".gem/credentials", ".cargo/credentials", ".cargo/credentials.toml", ".ngc/config", "containers/auth.json",
))  # fmt: skip
_SUFFIXES = (".pem", ".key", ".token", "credentials.json", ".ppk", ".p12", ".pfx", ".jks", ".kdbx", "_history.gpg")
#: A file that is called after what it holds: token, hf_token, wandb-api-key.txt, _netrc, netrc.bak; .bash_history.
_WORDS = re.compile(
    r"(?:.*[._-])?(?:token|api[_-]?key)(?:\.txt)?|(?:.*[._-])?netrc(?:[._-](?!.*(?:py|md|rst)$).*)?"
    r"|\.(?:bash|zsh|sh|ksh|fish|python|psql|mysql|sqlite|node_repl)_history"
)
_KEYS = ("id_rsa*", "id_dsa*", "id_ed25519*", "id_ecdsa*")
#: What nobody gets as a random value, but writes into documentation and tests.
_MADE_UP = re.compile(
    rb"x{4}|\.{3}|\*{3}|example|your|fake|dummy|placeholder|redacted|password|changeme|sample|secret|test|0{6}|1{5}|a{5}"
    rb"|12345|23456|abcdef|bcdefg|deadbeef|0123|foobar|none|null|invalid|not.?a|<|>|\$|\{|%",
    re.IGNORECASE,
)
_NO_NETRC = (
    ".py",
    ".ipynb",
    ".json",
    ".yaml",
    ".yml",
    ".toml",
    ".md",
    ".rst",
    ".sh",
    ".c",
    ".cpp",
    ".cu",
    ".h",
    ".png",
)
#: Code with a key in it is copied all the same, and named: without the script, the job would fail.
CODE_SUFFIXES = (".py", ".pyx", ".sh", ".bash", ".sbatch", ".slurm", ".c", ".cc", ".cpp", ".cu", ".h", ".jl", ".lua")


@dataclass(frozen=True)
class _Kind:
    """Credentials of one kind.

    hints: how `pattern` begins, in lower case: it is tried there only, which is quick; "" is the file's beginning.
    pattern: its last group is the value. distinct: different characters that a random value has at least.
    """

    name: str
    hints: tuple[bytes, ...]
    pattern: re.Pattern[bytes]
    distinct: int = 10


def _kind(name: str, hints: str, pattern: str, distinct: int = 10, flags: int = re.MULTILINE) -> _Kind:
    return _Kind(name, tuple(hint.encode() for hint in hints.split(" ")), re.compile(pattern.encode(), flags), distinct)


_START, _END = r"(?<![A-Za-z0-9_+=.-])", r"(?![A-Za-z0-9_/+=-])"
_LINE = r"(?<![^\n])"
_KINDS = (
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
#: What a netrc file of any name begins with, behind comments (the format is that of ftp(1)).
_NETRC = re.compile(rb"(?:\s|#[^\n]*\n)*(?:machine\s+\S+|default)\s+(?:(?:login|account)\s+\S+\s+){0,2}password\s")


def named_as_credential(path: str, *, is_folder: bool) -> str | None:
    """Return the file or folder (it ends in /) of this relative path that is known for credentials, or None."""
    parts = path.split("/")
    for number, name in enumerate(parts):
        is_file = number == len(parts) - 1 and not is_folder
        found = "/".join(parts[: number + 1])
        name = name.lower()
        if _is_env(name) or (name in _FOLDERS and not is_file):
            return found if is_file else found + "/"
        if is_file and (_is_secret_file(name) or "/".join(parts[-2:]).lower() in _PATHS):
            return found
    return None


def credentials_in(path: Path) -> str | None:
    """Return which kind of credentials the beginning of a file holds; None if none, or if it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(_BYTES)
    except OSError:
        return None  # whoever copies it says so
    if b"\0" in data:
        return None
    if not path.name.lower().endswith(_NO_NETRC) and _NETRC.match(data):
        return "netrc"
    lower = data.lower()
    for kind in _KINDS:
        if any(_holds(kind, hint, data, lower) for hint in kind.hints):
            return kind.name
    return None


def without_credentials(text: str) -> str:
    """Return a text without what looks like credentials: rather too little of it than one of them."""
    data = text.encode("utf-8", "surrogateescape")
    if _NETRC.match(data):
        return "[redacted: netrc]\n"
    for kind in _KINDS:
        lower = data.lower()
        if not any(hint in lower for hint in kind.hints):
            continue
        if kind.distinct == 0 and kind.pattern.search(data):
            return f"[redacted: {kind.name}]\n"
        data = kind.pattern.sub(_hidden, data)
    return data.decode("utf-8", "surrogateescape")


def _hidden(match: re.Match[bytes]) -> bytes:
    group = match.lastindex or 0
    start, end = match.start(group) - match.start(), match.end(group) - match.start()
    return match[0][:start] + b"[redacted]" + match[0][end:]


def _holds(kind: _Kind, hint: bytes, data: bytes, lower: bytes) -> bool:
    at = lower.find(hint)
    while at >= 0:
        match = kind.pattern.match(data, at)
        if match:
            value = match[match.lastindex or 0]
            if len(set(value)) >= kind.distinct and not _MADE_UP.search(value):
                return True
        at = lower.find(hint, at + 1) if hint else -1
    return False


def _is_env(name: str) -> bool:
    return name == ".env" or (name.startswith(".env.") and not name.endswith((".example", ".sample", ".template")))


def _is_secret_file(name: str) -> bool:
    if name in _NAMES or name.endswith(_SUFFIXES) or _WORDS.fullmatch(name):
        return True
    return not name.endswith(".pub") and any(fnmatchcase(name, key) for key in _KEYS)
