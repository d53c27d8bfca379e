"""The head's side: collect reports, try connections to and between the nodes, compare, and write the verdict."""

import asyncio
import json
import os
import re
import resource
import secrets
import sys
import time
from typing import Any

from slurmddp.records import refusal
from slurmddp.records.preflight import Finding, Verdict, any_bad, bad, plain, read_findings, warn
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.preflight import gpu_speed
from slurmddp.runtime.preflight.judge import Report, judge, partners
from slurmddp.runtime.preflight.local_checks import look, show, take_away
from slurmddp.runtime.preflight.node_settings import NodeSettings
from slurmddp.runtime.preflight.protocol import (
    BACKLOG,
    LONGEST,
    PORTS,
    SHARED,
    Streams,
    answers_with_name,
    meet,
    receive,
    sees,
    send,
    token_file,
    why,
)
from slurmddp.runtime.signing import ForgedError
from slurmddp.shared.files import write_whole

#: Connections back to nodes that are tried at once.
_AT_ONCE = 256
#: Seconds to tell the nodes what became of them.
_GOODBYE = 5.0
_ROUTE = "check its network (cable, switch, firewall, /etc/hosts), or set network.interface"
_LOG = "see its log"
_NOT_STARTED = re.compile(r"^srun: error: task (\d{1,6}) launch failed: (.+)", re.MULTILINE)
_LAUNCH = "check that the run folder is mounted there and can be written: Slurm opens the node's log in it"
_UNTRIED = "did not report whether it can connect to the other nodes"


class Head:
    """One preflight, as the first node runs it."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._interfaces = "0.0.0.0" if len(settings.nodes) > 1 else "127.0.0.1"
        self._token = secrets.token_hex(8)
        self._port = 0
        self._reports: dict[str, Report] = {}
        self._streams: dict[str, Streams] = {}
        self._news = asyncio.Event()
        self._judged = asyncio.Event()
        self._lines: list[str] = []
        self._back = asyncio.Semaphore(_AT_ONCE)
        self._open: set[asyncio.Task[Any]] = set()

    async def run(self) -> int:
        """Return 0 if all nodes can train, else 3. Raises UserError if the head itself cannot take part."""
        settings = self._settings
        began = time.monotonic()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:  # a connection for each node, of which there may be thousands
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        own = asyncio.create_task(look(settings))
        rendezvous = await self._listen()
        anywhere = await asyncio.start_server(answers_with_name(settings), self._interfaces, 0, backlog=BACKLOG)
        self._port = int(anywhere.sockets[0].getsockname()[1])
        # Only now: who sees it knows that the head listens.
        written = await asyncio.to_thread(show, settings, self._token)
        try:
            mine = await own
            mine.findings[:0] = written
            mine.skew = 0.0
            self._reports[settings.node] = mine
            await self._all_heard(began + settings.seconds)
            await self._try_pairs()
            return await self._judge()
        finally:
            self._judged.set()
            rendezvous.close()
            anywhere.close()
            if self._open:
                await asyncio.wait(self._open, timeout=_GOODBYE)
            await asyncio.to_thread(take_away, settings)

    async def _listen(self) -> asyncio.Server:
        deadline = time.monotonic() + self._settings.patience  # another one's probe may hold the port for a moment
        while True:
            try:
                port = self._settings.port
                return await asyncio.start_server(self._serve, self._interfaces, port, limit=LONGEST, backlog=BACKLOG)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise UserError(f"cannot listen on the rendezvous port {port}: {why(error)}") from None
            await asyncio.sleep(0.2)

    async def _all_heard(self, deadline: float) -> None:
        """Until each node has reported or left a word in the run folder; or until the deadline."""
        while len(self._reports) < len(self._settings.nodes) and time.monotonic() < deadline:
            try:
                await asyncio.wait_for(self._news.wait(), 0.5)
                self._news.clear()
            except asyncio.TimeoutError:
                for node, report in (await asyncio.to_thread(self._words)).items():
                    self._reports.setdefault(node, report)

    def _words(self) -> dict[str, Report]:
        """Return srun's errors, and the files of nodes: NODE.failed of node.sh, NODE.unreached of node.py."""
        words = self._not_started()
        try:
            names = set(os.listdir(self._settings.folder))
        except OSError:
            return {}
        for node in self._settings.nodes:
            for kind in ("failed", "unreached"):
                if f"{node}.{kind}" in names and node not in self._reports:
                    path = self._settings.folder / f"{node}.{kind}"
                    try:
                        text = path.read_text(encoding="utf-8", errors="replace")
                        said = refusal.read(text) if kind == "failed" else refusal.Refusal(text)
                    except OSError as error:
                        said = refusal.Refusal(f"wrote an unreadable status file: {why(error)}")
                    text = plain(said.text) or "failed without a message"
                    failed = kind == "failed"
                    links = {} if failed else {"rendezvous": bad(text, _ROUTE)}
                    words[node] = Report([bad(text, _LOG, said.fault)] if failed else [], links)
        return words

    def _not_started(self) -> dict[str, Report]:
        """Nodes where Slurm could not start the process: srun says so, and waits for the others. Task N is node N."""
        try:
            said = (self._settings.folder.parent / "srun.err").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return {}
        failed = {int(task): plain(text) for task, text in _NOT_STARTED.findall(said)}
        return {
            node: Report([bad(f"Slurm could not start a process there: {failed[task]}", _LAUNCH)])
            for task, node in enumerate(self._settings.nodes)
            if task in failed
        }

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection. Strangers, who may find the port, are not answered."""
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        settings = self._settings
        try:
            greeting = await receive(settings, reader)
            node = greeting.get("node")
            if node not in settings.nodes:
                return
            where = {"address": settings.address, "port": self._port}
            await send(settings, writer, {**where, "token": self._token, "time": time.time()})
            self._reports[node] = await self._understand(node, await receive(settings, reader))
            self._streams[node] = reader, writer  # _try_pairs uses it, until the verdict is there
            self._news.set()
            await self._judged.wait()
            await send(settings, writer, {"lines": [line for line in self._lines if line.partition(" ")[0] == node]})
            # The node closes first, so that the rendezvous port is free again at once.
            await asyncio.wait_for(reader.read(), _GOODBYE)
        except ForgedError as error:
            print(f"slurmddp: preflight: ignored a message: {error}", file=sys.stderr, flush=True)
        except (OSError, ValueError, KeyError, TypeError, asyncio.TimeoutError):
            pass
        finally:
            writer.close()
            self._open.discard(task)

    async def _understand(self, node: str, message: dict[str, Any]) -> Report:
        """A node's report, and what the head itself finds of it. Raises ValueError, KeyError, TypeError."""
        links = {str(kind): read_findings([item])[0] for kind, item in message["links"].items()}
        facts = {str(name): str(value) for name, value in message["facts"].items()}
        report = Report(read_findings(message["findings"]), links, facts)
        report.interface, report.network = str(message["interface"]), str(message["network"])
        report.skew = float(message["skew"])
        report.speeds = gpu_speed.from_json(message["speeds"])
        report.address, report.port = str(message["address"]), int(message["port"])
        if report.port:
            async with self._back:
                failed = await meet(self._settings, report.address, report.port, node)
            if failed:
                where = f"{report.address}, port {report.port} ({report.interface or 'interface unknown'})"
                report.links["back"] = bad(f"{self._settings.node} cannot reach it at {where}: {failed}", PORTS)
        file = token_file(self._settings.folder, node)
        if message["token"] and not await sees(file, str(message["token"]), self._settings.patience):
            reason = f"{self._settings.node} does not see this node's files in the run folder"
            report.links.setdefault("folder", bad(reason, SHARED))
        return report

    async def _try_pairs(self) -> None:
        """Have the nodes that are good so far connect to each other. One that does not answer is only warned about."""
        found = self._findings()
        good = [node for node in self._settings.nodes if node in self._streams and not any_bad(found[node])]
        await asyncio.gather(*(self._ask(node, others) for node, others in partners(good).items() if others))

    async def _ask(self, node: str, others: list[str]) -> None:
        """Have a node connect to others, and note in its report what came of it."""
        settings, report, (reader, writer) = self._settings, self._reports[node], self._streams[node]
        peers = [[other, self._reports[other].address, self._reports[other].port] for other in others]
        try:
            await send(settings, writer, {"peers": peers})
            # The node itself takes settings.patience at most.
            answer = await asyncio.wait_for(receive(settings, reader), 2 * settings.patience)
            unreached = answer["unreached"]
            report.unreached = {other: str(unreached[other]) for other in others if other in unreached}
        except asyncio.TimeoutError:
            report.findings.append(warn(f"{_UNTRIED}: no answer within {2 * settings.patience:.0f} s", _LOG))
        except (OSError, ValueError, KeyError, TypeError) as error:
            report.findings.append(warn(f"{_UNTRIED}: {why(error)}", _LOG))

    def _findings(self) -> dict[str, list[Finding]]:
        return judge(self._settings.nodes, self._reports, f"did not report within {self._settings.seconds:.0f} s")

    async def _judge(self) -> int:
        settings = self._settings
        found = self._findings()
        verdict = Verdict({node: tuple(found[node]) for node in settings.nodes})
        self._lines = verdict.lines()
        await asyncio.to_thread(write_whole, settings.folder / "verdict.json", json.dumps(verdict.write()) + "\n")
        print("\n".join(f"slurmddp: preflight: {line}" for line in self._lines), flush=True)
        return 3 if any(any_bad(items) for items in found.values()) else 0
