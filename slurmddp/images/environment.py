"""What of the user's environment the builder gets, and with it an image's own code: %test runs with all of it."""

from __future__ import annotations

import os
import re

_PASSED = re.compile(
    # what any program needs, and what modules set for the builder itself
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|XDG_RUNTIME_DIR|LD_LIBRARY_PATH"
    # the way to the internet, which %post needs, too
    r"|(?i:(https?|ftp|all|no)_proxy)|SSL_CERT_(FILE|DIR)"
    # where and how it builds; its binds, variables and passwords are not among them
    r"|(APPTAINER|SINGULARITY)_(CACHEDIR|TMPDIR|DISABLE_CACHE|CONFIGDIR|CONF(IG)?_FILE|IGNORE_\w+|MKSQUASHFS_\w+"
    r"|DEBUG|VERBOSE|MESSAGELEVEL|NOCOLOR)"
)


def passed_environment() -> dict[str, str]:
    """The variables of this process that a builder, and a program of an image, may see."""
    return {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}
