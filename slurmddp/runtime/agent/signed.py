"""What agents tell each other, signed. What is not is never read: torch unpickles the rendezvous state."""

import datetime
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from slurmddp.runtime.signing import ForgedError, Key

_COUNTER = 8  # bytes


class SignedBackend(RendezvousBackend):
    """Rendezvous state in a store. Each state has a number, so an older one cannot be put back."""

    def __init__(self, name: str, inner: C10dRendezvousBackend, key: Key, where: Sequence[str]) -> None:
        """`where`: rendezvous id and attempt, which every signature covers."""
        self._name, self._inner, self._key, self._where = name, inner, key, ("state", *where)
        self._newest = 0

    @property
    def name(self) -> str:
        return self._name

    def get_state(self) -> tuple[bytes, Any] | None:
        """Raises RendezvousStateError for a state that is not ours, or older than one that was seen."""
        found = self._read(self._inner.get_state)
        return None if found is None else (self._opened(found[0]), found[1])

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """Write the state; return as `get_state` does."""
        number = self._newest + 1
        sealed = self._key.seal(number.to_bytes(_COUNTER, "big") + state, *self._where)
        found = self._read(lambda: self._inner.set_state(sealed, token))
        return None if found is None else (self._opened(found[0]), found[1], found[2])

    def _read(self, call: Callable[[], Any]) -> Any:
        try:
            found = call()
        except RendezvousStateError as error:
            raise self._forged("not signed") from error
        if found is None and self._newest:
            raise self._forged("removed")
        return found

    def _opened(self, sealed: bytes) -> bytes:
        try:
            content = self._key.open(sealed, *self._where)
        except ForgedError as error:
            raise self._forged(str(error)) from error
        number = int.from_bytes(content[:_COUNTER], "big")
        if number < self._newest:
            raise self._forged("an older state was restored")
        self._newest = number
        return content[_COUNTER:]

    def _forged(self, why: str) -> RendezvousStateError:
        return RendezvousStateError(
            f"somebody else changed the state of rendezvous {self._where[1]} ({why}). It was not read, and this "
            f"attempt fails. Another user may be attacking the run: tell the site's support"
        )


class SignedStore:
    """The part of torch's Store that agents and the measurement of the network use, with signed values.

    Counters (`add`) are not signed, and have no content: a forged one makes an agent wait, or not wait, for others."""

    def __init__(self, store: Any, key: Key, where: Sequence[str], *, start: int) -> None:
        """`where`: whose store it is (rendezvous id), and attempt. Signatures also cover the start, and the name."""
        self.start = str(start)
        self._store, self._key, self._where = store, key, ("store", *where, self.start)

    def set(self, name: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else value
        self._store.set(name, self._key.seal(content, *self._where, name).decode())
        # torch does not wait for an answer to a set. With TLS, a process that exits now would take the value along.
        self._store.check([name])

    def get(self, name: str) -> bytes:
        """Waits until the value is there. Raises ForgedError for one that is not signed."""
        return self._opened(name, self._store.get(name))

    def multi_set(self, names: Sequence[str], values: Sequence[str | bytes]) -> None:
        for name, value in zip(names, values, strict=True):
            self.set(name, value)

    def multi_get(self, names: Sequence[str]) -> list[bytes]:
        found = self._store.multi_get(list(names))
        return [self._opened(name, value) for name, value in zip(names, found, strict=True)]

    def add(self, name: str, amount: int) -> int:
        return int(self._store.add(name, amount))

    def wait(self, names: Sequence[str], *timeout: datetime.timedelta) -> None:
        self._store.wait(list(names), *timeout)

    @property
    def timeout(self) -> datetime.timedelta:
        return cast(datetime.timedelta, self._store.timeout)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._store.set_timeout(timeout)

    def _opened(self, name: str, sealed: bytes) -> bytes:
        try:
            return self._key.open(sealed, *self._where, name)
        except ForgedError as error:
            raise ForgedError(
                f"somebody else wrote {name} into the store of {self._where[1]} ({error}). It was not read. "
                f"Another user may be attacking the run: tell the site's support"
            ) from error
