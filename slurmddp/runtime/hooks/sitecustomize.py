"""Loaded by Python itself as a script of the user's own starts: sees how it ends, for watch/usererrors.py.

begin.py puts this folder in front of PYTHONPATH. The script finds PYTHONPATH and sys.path as they were, and the
sitecustomize that it would have had is loaded. Nothing of slurmddp is imported before the script ends.
"""

import atexit
import importlib
import os
import sys
from typing import NoReturn

_plain_exit = sys.exit
_code: object = None


def _restore() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]
    rest = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if rest[0] == here:
        if rest[1]:
            os.environ["PYTHONPATH"] = rest[2]
        else:
            del os.environ["PYTHONPATH"]
    own = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")  # the one that the script would have had
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if own is not None:
            sys.modules["sitecustomize"] = own


def _exit(code: object = None, /) -> NoReturn:
    """sys.exit, which argparse calls with 2: the code is not to be seen later."""
    global _code
    _code = code
    _plain_exit(code)  # type: ignore[arg-type]


def _at_end() -> None:
    error = getattr(sys, "last_value", None)  # of an exception that nobody caught
    if error is None and _code != 2:
        return
    try:
        from slurmddp.runtime.watch import usererrors
    except ImportError as missing:  # the script has changed sys.path
        print(f"slurmddp: warning: cannot record how this process exits: {missing}", file=sys.stderr, flush=True)
        return
    usererrors.note(error)


_restore()
sys.exit = _exit
atexit.register(_at_end)
