"""What TLS costs at a start: python -m benchmarks.store_tls [RANKS] [NODES] [PAIRS]

Simulated ranks on this machine: each is a client of one store, and does what it does for two process groups: it writes
its address, reads those of all others, and meets them at a barrier. Nodes are processes, whose ranks are threads.
Prints the seconds from the first connection to the end of the slowest rank, without and with TLS, in turns.
"""

import datetime
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from slurmddp.run.create import write_pair
from slurmddp.runtime.agent import stores
from slurmddp.runtime.agent.tunnel import LOOPBACK, Tunnel

_LIMIT = datetime.timedelta(seconds=300)


def rank(number: int, world: int, at: tuple[str, int]) -> None:
    store, address = stores.connect(*at, _LIMIT), os.urandom(154 + 8 * world)  # as many bytes as gloo's (torch 2.13)
    for group in ("first", "second"):
        store.set(f"{group}/{number}", address)
        store.multi_get([f"{group}/{each}" for each in range(world)])
        if store.add(f"{group}/here", 1) == world:
            store.set(f"{group}/all", "1")
        store.wait([f"{group}/all"])


def node(number: int, nodes: int, world: int, port: int, local: Any, pair: str, ready: Any, go: Any, done: Any) -> None:
    at = (LOOPBACK, port)
    if pair and number:
        at = Tunnel().forward(*at, pair, 60).local
    elif pair:
        at = local
    ranks = range(number * world // nodes, (number + 1) * world // nodes)
    threads = [threading.Thread(target=rank, args=(each, world, at)) for each in ranks]
    ready.release()
    go.wait()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.release()


def measure(world: int, nodes: int, pair: str) -> float:
    """Return seconds."""
    context = multiprocessing.get_context("spawn")
    served = stores.serve(LOOPBACK, 0, _LIMIT, several_nodes=True, pair=pair)
    ready, go, done = context.Semaphore(0), context.Event(), context.Semaphore(0)
    common = (nodes, world, served.port, served.tunnel and served.tunnel.local, pair, ready, go, done)
    processes = [context.Process(target=node, args=(number, *common)) for number in range(nodes)]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    began = time.monotonic()
    go.set()
    for _ in processes:
        done.acquire()
    took = time.monotonic() - began
    for process in processes:
        process.join()
    return took


def main(world: int = 512, nodes: int = 8, pairs: int = 5) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if why := write_pair(Path(folder, "pair.pem")):
            raise SystemExit(why)
        ratios = []
        for _ in range(pairs):
            plain, tls = measure(world, nodes, ""), measure(world, nodes, f"{folder}/pair.pem")
            ratios.append(tls / plain)
            print(f"plain {plain:.2f} s   TLS {tls:.2f} s   ratio {ratios[-1]:.2f}", flush=True)
        spread = f"{statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{world} ranks on {nodes} nodes: median {spread}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
