"""One rank of the measurement: join, connect as the training will, measure, use more groups, test pairs if slow."""

import contextlib
import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from slurmddp.records.network import Verdict, not_measured
from slurmddp.records.preflight import plain
from slurmddp.runtime.agent import stores
from slurmddp.runtime.agent.signed import SignedStore
from slurmddp.runtime.measure import pairs
from slurmddp.runtime.network import groups, nccl_log
from slurmddp.runtime.network.judge import Measured, explain, verdict
from slurmddp.runtime.network.nccl_log import Transport
from slurmddp.runtime.network.settings import Settings
from slurmddp.runtime.signing import ForgedError
from slurmddp.runtime.watch.process_exit import leave
from slurmddp.shared.files import write_whole
from slurmddp.shared.units import listed

#: Seconds, once all ranks have joined: for the growing all-reduce, and at most for a pair to connect; for all of it.
_BUDGET, _PAIR, _LIMIT = 6.0, 5.0, 30.0
#: Seconds for further groups: at least, and as a multiple of what the first group took.
_GROUPS, _TIMES = 15.0, 3.0
#: Seconds of repeating one size.
_REPEAT = 0.7
#: Bytes: each size is so many times the one before.
_STEP = 8
_FIRST = {"nccl": 1 << 20, "gloo": 1 << 16}
_LAST = {"nccl": 1 << 30, "gloo": 1 << 25}
_AT_MOST = 20
#: Bytes of NCCL's log that are kept.
_LOG = 1 << 20


class Rank:
    """See `run`. All ranks take the same decisions: from times that are the slowest rank's."""

    def __init__(self, own: Settings) -> None:
        self._own = own
        self._plain: Any = None  # torch's store. The backend exchanges addresses in it, unsigned
        self._store: Any = None  # the same, for what the ranks tell each other
        self._log = own.scratch / f"slurmddp-nccl-{own.port}-{own.local}.log"
        self._began = time.monotonic()
        self._measured: Measured | None = None  # of rank 0 alone

    def run(self) -> int:
        """Return 0, or 1 if this rank failed. Rank 0 writes the verdict in either case."""
        own = self._own
        try:
            with _within(own.wait + _LIMIT, self._too_late):
                self._join()
            with _within(_LIMIT, self._too_late):
                self._prepare()
                began = time.monotonic()
                self._connect("ranks", range(own.world), _LIMIT - 5)
                limit = max(_GROUPS, _TIMES * (time.monotonic() - began))
                speeds = self._measure()
            self._more_groups(limit)
            with _within(_LIMIT, self._too_late):
                self._finish_with(speeds)
        except Exception as error:  # noqa: BLE001 - whatever it is, the head has to hear of it
            self._failed(f"{type(error).__name__}: {error}")
            return 1
        finally:
            self._keep_log()
        return 0

    def _join(self) -> None:
        """Meet at the head's store. Raises RuntimeError, UserError."""
        own, limit = self._own, datetime.timedelta(seconds=self._own.wait)
        address = stores.resolve(own.head, own.port)
        if own.rank == 0:
            several = len(own.nodes) > 1
            self._plain = stores.serve(address, own.port, limit, several_nodes=several, pair=own.pair).store
        else:
            self._plain = stores.connect(address, own.port, limit, own.pair)
        self._store = self._signed(self._plain)
        self._store.set(f"here/{own.node}/{own.local}", "1")
        self._meet("joined")
        self._store.wait(["joined/all"], limit)
        self._began = time.monotonic()

    def _signed(self, plain: Any) -> SignedStore:
        own = self._own
        return SignedStore(plain, own.key, ("the measurement of the network", own.attempt), start=own.port)

    def _meet(self, point: str) -> None:
        """Note in the store that this rank has come to a point. The last one sets POINT/all."""
        if self._store.add(point, 1) == self._own.world:
            self._store.set(f"{point}/all", "1")

    def _prepare(self) -> None:
        """Choose the device as the training does; NCCL's log goes to a file. Raises RuntimeError."""
        own = self._own
        self._backend = "nccl" if torch.cuda.is_available() else "gloo"
        self._device = torch.device("cpu")
        if self._backend == "nccl":
            if own.local >= torch.cuda.device_count():
                raise RuntimeError(f"has {torch.cuda.device_count()} GPU(s) for {own.ranks} ranks")
            self._log.unlink(missing_ok=True)
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "NCCL_DEBUG_FILE": str(self._log)}
            self._device = torch.device("cuda", own.local)
            torch.cuda.set_device(self._device)

    def _connect(self, name: str, ranks: Sequence[int], seconds: float) -> None:
        """Connect with these ranks, and no others, as the backend connects the ranks of the training."""
        dist.init_process_group(
            self._backend,
            store=dist.PrefixStore(name, self._plain),
            rank=ranks.index(self._own.rank),
            world_size=len(ranks),
            timeout=datetime.timedelta(seconds=seconds),
            device_id=self._device if self._backend == "nccl" else None,
        )
        dist.all_reduce(torch.zeros(1, device=self._device))

    def _measure(self) -> Mapping[int, float]:
        speeds = self._growing()
        self._store.set(f"net/{self._own.rank}", json.dumps(asdict(self._transport())))
        self._meet("measured")
        if self._own.rank == 0:
            self._store.wait(["measured/all"], datetime.timedelta(seconds=_LIMIT))
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
            self._measured = Measured(self._backend, self._transports(), interface, max(speeds.values()), speeds)
        return speeds

    def _more_groups(self, limit: float) -> None:
        """Use further process groups. If one hangs, rank 0 writes the verdict, and the process exits."""
        own = self._own
        # A client of the store answers one thread at a time, and torch waits in the first one.
        address = stores.resolve(own.head, own.port)
        plain = stores.connect(address, own.port, datetime.timedelta(seconds=_LIMIT), own.pair)
        signed = self._signed(plain)

        def noted(key: str) -> bool:
            with contextlib.suppress(ForgedError):
                return bool(plain.check([key]) and signed.get(key))
            return False

        def failed(why: str) -> None:
            try:
                print(f"slurmddp: network: a further process group: {why}", file=sys.stderr, flush=True)
                if own.rank == 0:
                    text, absent = groups.trouble(own, noted, why)
                    self._conclude(absent, groups=text)
                self._keep_log()
            except Exception as error:  # noqa: BLE001 - this thread is the last one that can say it
                self._failed(f"{type(error).__name__}: {error}")
            finally:
                leave(1)  # whatever hangs in torch is not waited for

        # The others wait longer: rank 0 must not take the end of one for the fault.
        with _within(limit if own.rank == 0 else limit + _PAIR, lambda: failed(f"no answer within {limit:.0f} s")):
            try:
                groups.use(own, self._store, self._device, 2 * limit)
                self._meet("grouped")
                self._store.wait(["grouped/all"], datetime.timedelta(seconds=2 * limit))
            except RuntimeError as error:  # torch's: a rank has gone
                failed(str(error))

    def _finish_with(self, speeds: Mapping[int, float]) -> None:
        slow: dict[str, str] = {}
        explanation = ""
        if self._own.wish.is_low(max(speeds.values())):
            slow, explanation = self._pairs(max(speeds))
        self._meet("finished")
        if self._own.rank == 0:
            self._store.wait(["finished/all"], datetime.timedelta(seconds=_LIMIT))  # the store is here
            self._conclude(slow, explanation)

    def _conclude(self, bad: Mapping[str, str], pairs: str = "", groups: str = "") -> None:
        assert self._measured is not None
        measured = replace(self._measured, seconds=time.monotonic() - self._began)
        self._write(verdict(measured, self._own.wish, bad, pairs, groups))

    def _growing(self) -> dict[int, float]:
        """Return GB/s by size. Stops before a size that would exceed the time."""
        size, found, began = _FIRST[self._backend], {}, time.monotonic()
        while True:
            took = self._time(size)
            found[size] = _bus(size, took, self._own.world)
            elapsed = self._slowest(time.monotonic() - began)
            size *= _STEP
            if size > _LAST[self._backend] or elapsed + 4 * _STEP * took > _BUDGET:
                return found

    def _time(self, size: int) -> float:
        """Return the seconds of one all-reduce of `size` bytes: the mean of several, on the slowest rank."""
        tensor = torch.zeros(size // 4, device=self._device)
        once = self._repeat(tensor, 1)
        times = max(1, min(_AT_MOST, int(_REPEAT / max(once, 1e-6))))
        return self._repeat(tensor, times) / times

    def _repeat(self, tensor: torch.Tensor, times: int) -> float:
        self._finish()
        began = time.monotonic()
        for _ in range(times):
            dist.all_reduce(tensor)
        self._finish()
        return self._slowest(time.monotonic() - began)

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _slowest(self, seconds: float) -> float:
        value = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)

    def _pairs(self, size: int) -> tuple[dict[str, str], str]:
        """Test pairs of nodes, all of a round at once. Only rank 0's answer counts."""
        own, speeds = self._own, dict[pairs.Pair, float]()
        for number, chosen in enumerate(pairs.rounds(own.nodes) if len(own.nodes) > 2 else ()):
            keys = [f"speed/{number}/{first}/{second}" for first, second in chosen]
            for pair, key in zip(chosen, keys, strict=True):
                if own.node in pair:
                    speed = self._test(pair, size)
                    if own.local == 0 and own.node == pair[0]:
                        self._store.set(key, str(speed))
            if own.rank == 0:
                self._store.wait(keys, datetime.timedelta(seconds=_LIMIT))
                speeds |= {pair: float(self._store.get(key)) for pair, key in zip(chosen, keys, strict=True)}
                self._store.set(f"round/{number}", "")
            # A pair waits a few seconds for each other only: all begin a round together.
            self._store.get(f"round/{number}")
        return explain(speeds, own.wish.floor or 0.0)

    def _test(self, pair: pairs.Pair, size: int) -> float:
        """Return GB/s between two nodes; 0 if they cannot work together."""
        numbers = sorted(self._own.nodes.index(node) for node in pair)
        ranks = [number * self._own.ranks + local for number in numbers for local in range(self._own.ranks)]
        try:
            if dist.is_initialized():  # not after a pair that failed
                dist.destroy_process_group()
            self._connect(f"pair/{' '.join(pair)}", ranks, _PAIR)
            return _bus(size, self._time(size), len(ranks))
        except RuntimeError as error:
            print(f"slurmddp: network: {' and '.join(pair)}: {error}", file=sys.stderr)
            return 0.0

    def _transport(self) -> Transport:
        if self._backend != "nccl":
            return Transport()
        try:
            with self._log.open(encoding="utf-8", errors="replace") as file:
                return nccl_log.read(file)
        except OSError:
            return Transport()

    def _transports(self) -> dict[str, Transport]:
        """By node, from what each rank has read in its own log."""
        if self._backend != "nccl":
            return {}
        own = self._own
        texts = self._store.multi_get([f"net/{rank}" for rank in range(own.world)])
        found = [nccl_log.from_json(json.loads(text)) for text in texts]
        nodes = enumerate(own.nodes)
        return {node: nccl_log.merge(found[number * own.ranks : (number + 1) * own.ranks]) for number, node in nodes}

    def _failed(self, why: str) -> None:
        print(f"slurmddp: network: {why}", file=sys.stderr, flush=True)
        if self._own.rank > 0:
            with contextlib.suppress(RuntimeError, AttributeError):  # no store, or the head has gone
                self._store.set(f"failed/{self._own.node}", why)
            return
        time.sleep(1)  # the others may say more
        self._write(not_measured(plain(self._others() or why)))

    def _others(self) -> str:
        """Return what is known of the other nodes, in few words."""
        with contextlib.suppress(RuntimeError, AttributeError, ForgedError):
            here = {node: self._plain.check([f"here/{node}/0"]) for node in self._own.nodes}
            missing = [node for node, there in here.items() if not there]
            if missing:
                return f"{listed(missing, 3)} did not start within {self._own.wait:.0f} s"
            for node in self._own.nodes:
                if self._plain.check([f"failed/{node}"]):
                    return f"{node}: {self._store.get(f'failed/{node}').decode(errors='replace')}"
        return ""

    def _too_late(self) -> None:
        """The end of the time: whatever hangs, in torch or in NCCL, is not waited for."""
        self._failed(f"no result within {_LIMIT:.0f} s")
        self._keep_log()
        leave(1)

    def _write(self, found: Verdict) -> None:
        print("\n".join(f"slurmddp: network: {line}" for line in found.lines()), flush=True)
        write_whole(self._own.logs / "verdict.json", json.dumps(found.write()) + "\n")

    def _keep_log(self) -> None:
        """The first rank's log of NCCL, for people."""
        with contextlib.suppress(OSError):
            if self._own.local == 0:
                with self._log.open(encoding="utf-8", errors="replace") as file:
                    write_whole(self._own.logs / f"{self._own.node}.nccl.log", file.read(_LOG))
            self._log.unlink(missing_ok=True)


@contextlib.contextmanager
def _within(seconds: float, late: Callable[[], None]) -> Iterator[None]:
    """Call `late` in another thread if the block takes longer."""
    watch = threading.Timer(seconds, late)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def _bus(size: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth in GB/s: what each link carries, whatever the number of ranks (as in nccl-tests)."""
    return size / max(seconds, 1e-9) * 2 * (ranks - 1) / ranks / 1e9
