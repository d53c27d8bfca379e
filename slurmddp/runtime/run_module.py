"""What begin.py starts for `-m MODULE [ARGS ...]`: the module, as `python -m` runs it, but without the working folder.

Python would look for modules in the working folder first, where the code may have changed since the submission. The
run's copy of the code is in PYTHONPATH. Standard library only.
"""


def _main() -> None:
    """Run the module of the command line as __main__, in whose globals nothing of this file stays."""
    import os
    import runpy
    import sys

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]
    del sys.argv[0], globals()["_main"]
    # What the interpreter itself calls for -m. The public run_module would clear the globals of threads at its end.
    runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]


_main()
