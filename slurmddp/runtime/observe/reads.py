"""Whether this process has read anything that an earlier start of the run may have saved."""

import os
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Libraries that read files in native code, which Python does not see.
_NATIVE = ("h5py", "tensorstore", "s3torchconnector", "tensorizer")
#: What Python, and what compilers keep, which is no state of a training.
_CODE = (".py", ".pyc", ".so")
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


class Reads:
    """Looks, by an audit hook of Python and in front of safetensors, at each file that this process opens to read, and
    at each host that it connects to. It keeps the first that may hold a state: a file that was changed since a moment,
    or any other host.
    """

    def __init__(self, since: float) -> None:
        """Look from now on. since: unix seconds."""
        self._since, self._found = since, ""
        #: What was changed later than that does not count, either.
        self.until = float("inf")
        #: Threads that are none of the script's.
        self.ignored: set[int] = set()
        caches = [path for name in _CACHES if (path := os.environ.get(name))]
        caches += [os.path.expanduser("~/.triton/"), os.path.join(tempfile.gettempdir(), "torchinductor_")]
        self._caches = ("/proc/", "/sys/", *caches)
        self.active = True
        self._safetensors = SafetensorsReads(lambda path: self._audit("open", (path, None, os.O_RDONLY)))
        sys.addaudithook(self._audit)  # which nobody can remove

    @property
    def found(self) -> str:
        """Return what may have been loaded, in words; empty if it is certain that nothing was."""
        if self._found:
            return self._found
        unseen = _NATIVE if self._safetensors.sure else ("safetensors", *_NATIVE)
        native = next((name for name in unseen if name in sys.modules), None)
        return f"it uses {native}, whose reads are not seen" if native else ""

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Called by Python for each event, in any thread: it must be quick, and never raise."""
        if event not in ("open", "socket.connect") or not self.active or self._found:
            return
        try:
            if threading.get_ident() not in self.ignored:
                self._found = self._file(args[0], args[2]) if event == "open" else _host(args[0], args[1])
        except Exception:  # noqa: BLE001 - a path or an address of any kind: the script must not notice
            return

    def _file(self, path: Any, flags: int) -> str:
        if isinstance(path, int) or flags & os.O_ACCMODE == os.O_WRONLY or flags & (os.O_APPEND | os.O_TRUNC):
            return ""  # opened by its number, or to write, or as a log
        name = os.path.abspath(os.fsdecode(path))
        if name.endswith(_CODE) or name.startswith(self._caches):
            return ""
        facts = os.stat(name)  # one that is not there cannot be read
        changed = self._since <= max(facts.st_mtime, facts.st_ctime) <= self.until
        # An empty file, such as a lock, holds no state.
        return f"it has read {name}" if changed and facts.st_size and stat.S_ISREG(facts.st_mode) else ""


def _host(sock: socket.socket, address: Any) -> str:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    host = str(address[0])
    return "" if host == "localhost" or host.startswith("127.") or host == "::1" else f"it has connected to {host}"


#: What its native module has in versions 0.4 to 0.8. Of these, safe_open alone opens a file by its name to read it.
_KNOWN = {
    "SafetensorError", "TensorSpec", "deserialize", "safe_open", "_safe_open_handle", "serialize", "serialize_file",
}  # fmt: skip
_RUST = "_safetensors_rust"


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
        native: Any = sys.modules.get(f"safetensors.{_RUST}")
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
