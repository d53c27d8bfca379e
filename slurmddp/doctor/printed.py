"""Lines in which a program shows its settings: what a variable or an argument says has not happened."""

import re

#: Names of what happened, not of a setting; and a log's line that is an error by its level.
_EVENT = (
    r"(?i:\w*(?:err|except|fail|fatal|warn|abort|kill|crash)\w*|msg|message|reason|state|status|signal|detail|time|ts)"
)
_IS_ERROR = re.compile(r"(?i)\b(?:level|severity|lvl)[\"']?\s*[:=]\s*[\"']?(?:err|fatal|critical|panic)")
_SETTINGS = re.compile(
    r"(?:export |setenv |declare -\w+ )?[A-Z_](?:[A-Z0-9_]*|\w*(?:%%|\(\)))="  # env, export -p
    rf"|(?!{_EVENT}=)[a-z_][\w.]*="
    r"|\++ \S"  # bash's set -x
    r"|(?:[\w .-]{0,40}[:=]\s*)?(?:environ|\w*(?:Namespace|Config|Args|Arguments|Settings))\("
    rf"|(?:[\w .-]{{0,40}}[:=]\s*)?\{{?[\"'](?!{_EVENT}[\"'])[\w.-]+[\"']\s*:\s"  # JSON, a dictionary
    r"|[\w.]+\[[\"']\w+[\"']\]\s*="
    rf"|\s*(?!{_EVENT}:)[a-z][a-z0-9]*(?:_[a-z0-9]+)+:\s"  # YAML
    r"|\s*[a-z][\w-]*\s\.{3,}\s"  # a table of arguments
    r"|(?i:sys\.argv|argv|args|arguments|command|cmd|running|launching|executing)\s?[:=]\s"
    r"|\[[\"']"
    r"|(?:\S*/)?(?:torchrun|python[\d.]*|srun|sbatch|mpirun|accelerate|deepspeed)\s[^:]*\s--?\w"
)


def shows_settings(text: str) -> bool:
    """Return whether a line, without its prefix, shows variables, arguments or a configuration."""
    return _SETTINGS.match(text) is not None and _IS_ERROR.search(text) is None
