"""The files that safetensors opens: native code reads them, so Python's audit hooks do not see it."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: What its native module has in versions 0.4 to 0.8. Of these, safe_open alone opens a file by its name to read it.
_KNOWN = {
    "SafetensorError", "TensorSpec", "deserialize", "safe_open", "_safe_open_handle", "serialize", "serialize_file",
}  # fmt: skip
_NATIVE = "_safetensors_rust"


class SafetensorsReads:
    """Stands in front of safetensors.safe_open, if this process imports safetensors later, and tells of each file."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        """tell: gets each path before it is opened, in any thread. It must be quick, and never raise."""
        self._tell, self._pid = tell, os.getpid()
        #: Whether all reads of safetensors are seen.
        self.sure = False
        if "safetensors" not in sys.modules:  # else its safe_open may be known to others already
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find safetensors as the other finders do, and have its loader tell when it is loaded."""
        if name != "safetensors" or os.getpid() != self._pid:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((found for finder in finders if (found := finder.find_spec(name, path, target))), None)
        loader: Any = spec and spec.loader
        if hasattr(loader, "exec_module"):
            plain = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                plain(module)
                self._stand_before(module)

            loader.exec_module = exec_module
        return spec

    def _stand_before(self, package: Any) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        native: Any = sys.modules.get(f"safetensors.{_NATIVE}")
        names = {name for name in vars(native or package) if not name.startswith("__")}
        plain = getattr(native, "safe_open", None)
        if plain is None or getattr(package, "safe_open", None) is not plain or names - _KNOWN:
            return  # a version that nobody has looked at
        package.safe_open = native.safe_open = _standing_before(plain, self._tell)
        self.sure = True


def _standing_before(plain: Any, tell: Callable[[Any], None]) -> Any:
    """Return what is called and asked as the class `plain` is, which nothing can inherit from."""

    class Before(type):
        def __call__(cls, *args: Any, **options: Any) -> Any:
            tell(args[0] if args else options.get("filename"))
            return plain(*args, **options)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, plain)

        def __getattr__(cls, name: str) -> Any:
            return getattr(plain, name)

    return Before(plain.__name__, (), {"__doc__": plain.__doc__, "__module__": plain.__module__})
