"""Which files of a project hold credentials: by their name, and by what their first KiB say."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

from slurmddp.records.redact import KINDS, Kind

#: Of each file: credentials stand near the beginning, and a project may have 20,000 files.
_BYTES = 32 * 1024
_FOLDERS = frozenset({".ssh", ".gnupg", ".aws", ".azure", ".oci", ".password-store"})
_OURS = "/slurmddp/secrets"  # addresses of alerts, see alerts/secrets.py
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


#: What a netrc file of any name begins with, behind comments (the format is that of ftp(1)).
_NETRC = re.compile(rb"(?:\s|#[^\n]*\n)*(?:machine\s+\S+|default)\s+(?:(?:login|account)\s+\S+\s+){0,2}password\s")


def named_as_credential(path: str, *, is_folder: bool) -> str | None:
    """Return the file or folder (it ends in /) of this relative path that is known for credentials, or None."""
    parts = path.split("/")
    for number, name in enumerate(parts):
        is_file = number == len(parts) - 1 and not is_folder
        found = "/".join(parts[: number + 1])
        name = name.lower()
        if _is_env(name) or ((name in _FOLDERS or f"/{found}".endswith(_OURS)) and not is_file):
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
    for kind in KINDS:
        if any(_holds(kind, hint, data, lower) for hint in kind.hints):
            return kind.name
    return None


def _holds(kind: Kind, hint: bytes, data: bytes, lower: bytes) -> bool:
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
