"""What no definition file can say, refused before anything is converted, each with what to write instead."""

from __future__ import annotations

from slurmddp.images.dockerfile.lines import Instruction

_RUN_FLAGS = {
    "mount": "take the option away (a cache only saves time); COPY what is bound; do what needs a secret outside",
    "network": "take the option away: a build has the network of the machine that it runs on",
    "security": "take the option away: a build has no more rights than its user",
}
_FLAGS = {
    "FROM": {"platform"},
    "COPY": {"from", "chown", "chmod", "link"},
    "ADD": {"chown", "chmod", "link"},
    "HEALTHCHECK": {"interval", "timeout", "start-period", "start-interval", "retries"},
}


def check(instruction: Instruction) -> None:
    """Raise UserError where its keyword or an option cannot be converted. A heredoc is refused in `lines`."""
    keyword = instruction.keyword
    if keyword == "ONBUILD":
        raise instruction.error(
            "ONBUILD is for images that are built from this one, and a .sif keeps no such triggers",
            "write the instruction into the Dockerfile that needs it",
        )
    if keyword == "SHELL":
        raise instruction.error(
            "SHELL is not converted: every RUN goes through /bin/sh",
            'name the shell where it is needed: RUN ["/bin/bash", "-c", "..."]',
        )
    for name, _ in instruction.flags:
        if keyword == "RUN":
            todo = _RUN_FLAGS.get(name, "take the option away")
            raise instruction.error(f"RUN --{name} is BuildKit's own and is not converted", todo)
        if name not in _FLAGS.get(keyword, ()):
            raise instruction.error(f"{keyword} --{name} is not converted", "take the option away")
