"""Loaded by Python itself as a script of the user's own starts: sees how it ends, for watch/usererrors.py, and that it
imports torch, for observe/ and for torch_private.py.

begin.py puts this folder in front of PYTHONPATH. The script finds PYTHONPATH and sys.path as they were, so that no
process that it starts comes here, and the sitecustomize that it would have had is loaded. Nothing of slurmddp is
imported before the script imports torch or ends.
"""

import atexit
import contextlib
import importlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

#: In a rank that is forked (slurmddp/runtime/agent/forking_template.py): torch, until the script imports it.
_loaded: Any = None
if "SLURMDDP_TEMPLATE" in os.environ:
    from slurmddp.runtime.agent import forking_template

    try:
        # It returns in ranks only, with the environment of each.
        _loaded = forking_template.serve(os.environ.pop("SLURMDDP_TEMPLATE"))
    except BaseException:  # noqa: BLE001 - Python itself would go on to the script, as a rank that nobody asked for
        traceback.print_exc()
        os._exit(1)
    del forking_template
_plain_exit = sys.exit
#: Whether the ranks meet where no stranger is, and whether the script is observed.
_MEETS = "SLURMDDP_STORE" in os.environ
_OBSERVED = {"SLURMDDP_RUN", "SLURMDDP_OBSERVE"} <= {*os.environ}
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


def _let_gloo_end() -> None:
    """Give gloo's threads time to drop the last operation's tensors, for which they need the interpreter: one that
    asks for it while it ends aborts the process (torch 2.13, a script that does not destroy its process group).
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        time.sleep(0.1)


class _TorchImport:
    """An import hook: once this process has imported torch, it is prepared. A child that it forks is not."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torch" and _loaded is not None:
            spec = _loaded.torch.__spec__
            spec.loader.create_module = lambda _: _loaded.torch
            self._follow(spec.loader)
            return spec  # type: ignore[no-any-return]
        if name != "torch" or os.getpid() != self._pid:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((found for finder in finders if (found := finder.find_spec(name, path, target))), None)
        if spec is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        """Have the loader tell when it has loaded torch. Somebody who only looks for torch loads nothing."""

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            if _loaded is None:
                loader.exec_module(module)
            else:
                del loader.create_module
                _loaded.give_back()
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                if os.getpid() == self._pid:
                    _prepare()

        # A loader of another kind: the script runs unobserved.
        with contextlib.suppress(AttributeError, TypeError):
            loader.exec_module = exec_module


def _prepare() -> None:
    if _MEETS:
        try:
            from slurmddp.runtime import torch_private
        except ImportError as error:  # such as a script that has changed sys.path
            print(f"slurmddp: note: this process does not meet the others past strangers: {error}", file=sys.stderr)
        else:
            torch_private.meet_privately()
    if _OBSERVED:
        _observe()


def _observe() -> None:
    try:
        from slurmddp.runtime.observe import observer
    except Exception as error:  # noqa: BLE001 - such as a script that has changed sys.path; it runs as well without
        print(f"slurmddp: warning: this script is not observed: {error}", file=sys.stderr, flush=True)
        return
    observer.start()


_restore()
sys.exit = _exit
if os.environ.get("SLURMDDP_RANK_PID", str(os.getpid())) == str(os.getpid()):  # else started by a bash script
    atexit.register(_at_end)
if "RANK" in os.environ:
    atexit.register(_let_gloo_end)
    if _MEETS or _OBSERVED or _loaded is not None:
        sys.meta_path.insert(0, _TorchImport())
