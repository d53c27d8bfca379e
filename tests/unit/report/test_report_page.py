"""`slurmddp report`: one HTML file about a run, or two, whatever the run folder holds."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slurmddp.report.charts import line_chart
from slurmddp.run.curves import Point, read_curves
from slurmddp.run.layout import RunFolder
from slurmddp.run.ledger import KINDS
from tests.helpers import ROOT, Desk, Result

Cli = Callable[..., Result]

ZERO = 1_793_491_200
EVIL = "<script>alert(1)</script>"
VOID = {"meta", "br"}
LOST = list(KINDS).index("lost")


class Page(HTMLParser):
    """A page as its elements and texts; closing tags must fit."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []  # innermost element, text
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        assert len({name for name, _ in attrs}) == len(attrs), "an attribute twice"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def cells(self) -> list[str]:
        return [text for tag, text in self.texts if tag in ("td", "th")]

    def after(self, cell: str) -> str:
        """The text of the cell behind one with this text."""
        return self.cells()[self.cells().index(cell) + 1]


def check(text: str) -> Page:
    """What every report must hold to: it runs and loads nothing, and can be read without seeing it."""
    page = Page(text)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "link", "iframe", "object", "form", "foreignobject", "base"}
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "srcset", "xlink:href")]
        assert attributes.get("href", "#").startswith("#")
    (policy,) = [each["content"] for each in page.all("meta") if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline';")
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        for name in [*attributes.get("aria-labelledby", "").split(), attributes.get("href", "#")[1:]]:
            assert not name or name in ids
    assert page.all("html") == [{"lang": "en"}] and len(page.all("h1")) == 1
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for drawing in page.all("svg"):
        assert drawing["role"] == "img" and (drawing.get("aria-label") or drawing.get("aria-labelledby"))
    assert all("scope" in head for head in page.all("th"))
    return page


def write_run(
    folder: Path,
    *,
    steps: int = 300,
    loss: float = 10.0,
    transport: str = "InfiniBand",
    evil: str = "",
    **manifest: Any,
) -> RunFolder:
    """A run of two attempts on two nodes: a rank fails at half of the steps, and the second attempt goes on."""
    run = RunFolder(folder)
    for path in (run.logs, run.markers):
        path.mkdir(parents=True)
    run.job_json.write_text("{}")
    run.job_yaml.write_text(
        f"name: gpt\ntrain:\n  steps: {steps}\n  data: {{path: '/data/{evil}', exclude: [a.txt]}}\n"
    )
    made = {"schema": 1, "run": folder.name, "slurmddp": "0.1.0", "command": ["slurmddp", "submit", evil], **manifest}
    run.manifest.write_text(json.dumps(made))
    sent = {"schema": 1, "job_id": "7", "scheduler": "slurm", "command": [], "time": "2026-11-01T00:00:00+00:00"}
    run.submission.write_text(json.dumps(sent))
    (run.markers / "attempt-001.json").write_text(json.dumps({"state": "done", "step": steps, "steps": steps}))
    middle, script, rank = 100 + steps // 2, {"attempt": 0, "node": "n1"}, {"attempt": 0, "node": "n1", "rank": 0}
    speeds = {"1048576": 11.5, "1073741824": 187.4}
    measured = {"result": "ok", "backend": "nccl", "transport": transport, "bus_gb_s": 187.4, "speeds": speeds}
    events = [
        (60, "job_started", {**script, "job_id": "7", "nodes": "n[1-2]"}),
        (70, "network", {**script, "seconds": 5, "text": "187 GB/s", "measured": measured}),
        (72, "attempt_started", {**script, "nodes": "n1 n2"}),
        (80, "started", {**rank, "world": 8, "torch": "2.13", "device": "cuda", "backend": "nccl", "nodes": 2}),
        (99, "ready", {**rank, "step": 0}),
        *((100 + at, "evaluated", {**rank, "step": at, "loss": loss / at + 0.1}) for at in range(50, steps // 2, 50)),
        (150, "straggler_begins", {**rank, "host": "n2", "slow_rank": 5, "part": "compute", "factor": 1.5}),
        (160, "straggler_ends", {**rank, "host": "n2", "slow_rank": 5, "part": "compute", "factor": 1.5}),
        (100 + steps // 2 - 10, "checkpoint_saved", {**rank, "step": steps // 2 - 10, "seconds": 1, "stall": 0.1}),
        (middle, "error", {**rank, "rank": 5, "node": "n2", "kind": "RuntimeError", "message": f"boom {evil}"}),
        (middle + 1, "attempt_ended", {**script, "exit_code": 1, "cause": f"boom {evil}", "decision": "next"}),
        (middle + 2, "attempt_started", {"attempt": 1, "node": "n1", "nodes": "n1 n2"}),
        (middle + 9, "resumed", {**rank, "attempt": 1, "step": steps // 2 - 10, "path": evil}),
        (middle + 10, "ready", {**rank, "attempt": 1, "step": steps // 2 - 10}),
        (steps + 130, "finished", {**rank, "attempt": 1, "state": "done", "step": steps, "steps": steps}),
        (steps + 131, "attempt_ended", {"attempt": 1, "node": "n1", "exit_code": 0, "decision": "done"}),
        (steps + 132, "job_ended", {"attempt": 1, "node": "n1", "job_id": "7", "exit_code": 0, "decision": "done"}),
    ]  # fmt: skip
    run.events.write_text(
        "".join(json.dumps({"time": ZERO + at, "event": name, **more}) + "\n" for at, name, more in events)
    )
    told = [(100 + step, 0, step) for step in range(1, steps // 2 + 1)]
    told += [(120 + step, 1, step) for step in range(steps // 2 - 9, steps + 1)]
    rows = [
        {"time": ZERO + at, "attempt": attempt, "step": step, "start": ZERO + attempt, "loss": round(loss / step, 4),
         "tokens_per_second": 1e6 + step, "mfu": 0.4,
         "seconds": {"data": 0.1 * lines, "forward": 0.5 * lines, "network": 0.4 * lines}}
        for at, attempt, step in told
        for lines in [step - attempt * (steps // 2 - 10)]
    ]  # fmt: skip
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def without_slurm(desk: Desk) -> None:
    for name in ("scontrol", "squeue", "sacct"):
        assert shutil.which(name, path=desk.environment["PATH"]) is None


def written(cli: Cli, desk: Desk, *words: str) -> Page:
    done = cli("report", *words, "-o", "page.html", "--force")
    assert (done.code, done.out) == (0, "page.html\n"), done.err
    return check((desk.project / "page.html").read_text(encoding="utf-8"))


def test_one_run_when_the_job_is_gone_and_there_is_no_slurm(desk: Desk, cli: Cli) -> None:
    without_slurm(desk)
    where = {"train.steps": "job file: job.yaml:3", "train.data": "job file: job.yaml:2"}
    where |= {"train.data.exclude": "command line: --set train.data.exclude", "alerts": "command line: --set alerts"}
    where["alerts.0"] = "command line: --set alerts"  # as `submit` records it
    run = write_run(desk.project / "runs" / "gpt-1", origins=where)
    with run.job_yaml.open("a") as file:
        file.write("alerts: [{to: ntfy, on: [failed]}]\n")
    page = written(cli, desk, str(run.path))
    titles = [text for tag, text in page.texts if tag == "h2"]
    assert titles == [
        "Summary", "Curves", "Parts of a step", "Stragglers", "GPU use", "Goodput", "Timeline", "Faults and recoveries",
        "Network", "Configuration", "Environment",
    ]  # fmt: skip
    assert page.after("State").startswith("done") and page.after("Step") == "300 of 300 (100 %)"
    assert page.after("Waiting for the network") == "40 % of the step time"
    assert page.after("Node-hours") == f"{2 * (132 + 300 - 60) / 3600:.3g}"
    assert "Energy" not in page.cells() and ("p", "Not recorded.") in page.texts
    assert page.after("Transport") == "InfiniBand" and page.after("All-reduce of 1.0 MiB") == "11.5 GB/s"
    assert {"n2", "compute", "RuntimeError", "boom"} <= set(re.findall(r"\w+", " ".join(page.cells())))
    assert page.after("train.steps") == "300" and page.after("300") == "job file: job.yaml:3"
    assert page.after("name") == "gpt" and page.after("gpt") == "built-in"
    assert page.after("/data/") == "built-in", "a map that the file has says nothing about its other keys"
    assert page.after("a.txt") == "command line: --set train.data.exclude"
    assert page.after("ntfy") == page.after("failed") == "command line: --set alerts", "a list that was set as a whole"
    assert sum(each.get("class") == "failed" for each in page.all("rect")) == 1
    lines = page.all("polyline")
    assert len(lines) == 4, "training, validation, tokens per second, mfu"
    assert len(lines[0]["points"].split()) == 300, "each step once: those that were trained again count"
    assert page.all("figure") and len(page.all("figure")) == 3 + 2


def test_names_and_logs_of_others_are_only_text(desk: Desk, cli: Cli) -> None:
    run = write_run(
        desk.project / "runs" / "gpt-<script>alert(1)\u202e", evil=EVIL, transport=f'"><b>{EVIL}', user=EVIL
    )
    (run.markers / "attempt-001.json").unlink()
    text = (
        run.events.read_text()
        .replace('"exit_code": 0', '"exit_code": 1')
        .replace('"decision": "done"', '"decision": "failed"')
    )
    run.events.write_text(
        text.replace(
            '"exit_code": 1, "decision"', '"exit_code": 1, "cause": "unknown", "kind": "not found", "decision"'
        )
    )
    (run.logs / "attempt-001").mkdir()
    (run.logs / "attempt-001" / "n1.log").write_text(f"[rank0]: RuntimeError: CUDA error {EVIL} &amp; \x1b[31m\n")
    done = cli("report", str(run.path))
    assert done.code == 0, done.err
    (made,) = desk.project.glob("gpt-*.html")
    page = check(made.read_text(encoding="utf-8"))
    shown = " ".join(text for _, text in page.texts)
    assert shown.count(EVIL) >= 4 and "\u202e" not in shown and "\x1b" not in shown
    assert "gpt-<script>alert(1)\\u202e" in shown


def test_two_runs(desk: Desk, cli: Cli) -> None:
    one = write_run(desk.project / "runs" / "gpt-1")
    two = write_run(desk.project / "runs" / "gpt-2", steps=200, loss=20.0, transport="TCP")
    page = written(cli, desk, str(one.path), "--compare", str(two.path))
    cells = page.cells()
    at = cells.index("Transport")
    assert cells[at : at + 3] == ["Transport", "InfiniBand", "TCP"]
    at = cells.index("train.steps (differs)")
    assert cells[at + 1 : at + 5] == ["300", "not recorded", "200", "not recorded"]
    assert cells.index("train.steps (differs)") < cells.index("name")
    lost = [each["class"] for tag, each in page.elements if tag == "i" and each["class"] == f"key c{LOST}"]
    assert len(lost) == 2, "a kind of time has its own colour, whatever else a run has"
    names = [text for tag, text in page.texts if tag == "span"]
    assert {"training A", "validation A", "training B", "validation B"} <= set(names)
    assert [text for tag, text in page.texts if tag == "h3"][:2] == ["A: gpt-1", "B: gpt-2"]


def test_the_same_facts_for_programs(desk: Desk, cli: Cli) -> None:
    one, two = (write_run(desk.project / "runs" / f"gpt-{number}") for number in (1, 2))
    done = cli("report", str(one.path), "--compare", str(two.path), "--json")
    first, second = json.loads(done.out)
    assert (first["run_id"], second["run_id"]) == ("gpt-1", "gpt-2") and not list(desk.project.glob("*.html"))
    assert first["status"]["step"] == 300 and first["goodput"]["attempts"] == 2
    assert first["parts_seconds"] == pytest.approx(
        first["parts_seconds"] | {"data": 31, "forward": 155, "network": 124}
    )
    assert first["node_hours"] == pytest.approx(2 * (132 + 300 - 60) / 3600, abs=1e-4)
    assert first["curves"]["loss"][-1] == {"step": 300, **dict.fromkeys(("low", "mean", "high"), round(10 / 300, 4))}
    assert [each["event"] for each in first["faults"]] == ["error", "resumed"] and len(first["attempts"]) == 4
    assert first["network"]["bus_gb_s"] == 187.4
    assert first["configuration"]["train.steps"] == {"value": "300", "set_by": "not recorded"}
    page = (ROOT / "docs/operate.md").read_text().partition("`report --json` prints")[2].partition("\n\n")[0]
    assert set(first) - {"run_id"} <= set(re.findall(r"`(\w+)`", page))
    refused = cli("report", str(one.path), "--json", "-o", "page.json")
    assert refused.code == 2 and "> FILE" in refused.err and not (desk.project / "page.json").exists()


@pytest.mark.parametrize("kind", ["nothing", "own script", "damaged"])
def test_whatever_a_run_folder_holds(kind: str, desk: Desk, cli: Cli) -> None:
    folder = desk.project / "runs" / "gpt-1"
    run = write_run(folder)
    if kind == "nothing":
        for path in (run.events, run.metrics, run.job_yaml, run.submission, run.job_json):
            path.unlink()
        run.manifest.write_text("{}")
    elif kind == "own script":
        run.job_json.unlink()
        rows = [{"time": ZERO + 100 + at, "attempt": 0, "step": at, "steps_per_second": 1.5} for at in range(1, 9)]
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "damaged":
        odd: list[Any] = [None, [], {}, "x", -1, 1e308, 10**30]
        for name in ("job_started", "attempt_started", "attempt_ended", "network", "error", "evaluated", "started",
                     "straggler_begins", "straggler_ends", "resumed", "checkpoint_saved"):  # fmt: skip
            for value in odd:
                keys = (
                    "time",
                    "attempt",
                    "rank",
                    "node",
                    "nodes",
                    "step",
                    "loss",
                    "measured",
                    "host",
                    "factor",
                    "exit_code",
                )
                with run.events.open("a") as file:
                    file.write(json.dumps(dict.fromkeys(keys, value) | {"event": name}) + "\n")
                    file.write(
                        json.dumps({"event": name, "time": ZERO + 400, "attempt": 1, "measured": {"speeds": value}})
                        + "\n"
                    )
        with run.metrics.open("a") as file:
            for value in odd:
                file.write(json.dumps({"step": value, "loss": value, "seconds": value}) + "\n{\n")
            file.write('{"step": 301, "loss": 1.2.3}\n{"step": 302, "loss": 1e999}\n')
        samples = run.gpu_samples(1, "node1")
        samples.parent.mkdir(parents=True)
        samples.write_text('{"time": 5, "gpus": [{"gpu": 0, "use": 93, "mhz": "x"}, {"gpu": []}, 7]}\n')
        run.manifest.write_text(json.dumps({"schema": 1, "git": [], "image": "x", "origins": 7, "command": {"a": 1}}))
        run.job_yaml.write_text("a: [")
    page = written(cli, desk, str(folder))
    assert json.loads(cli("report", str(folder), "--json").out)
    if kind == "nothing":
        assert page.after("State").startswith("not submitted") and ("p", "No metrics lines are recorded.") in page.texts
    elif kind == "own script":
        assert page.after("Speed, lately") == "1.50 steps/s"
    elif kind == "damaged":
        assert page.after("node1") == "1 GPU: 93 % busy"


def test_a_file_that_exists_is_kept(desk: Desk, cli: Cli) -> None:
    run = write_run(desk.project / "runs" / "gpt-1")
    page = desk.write("page.html", "mine")
    done = cli("report", str(run.path), "-o", "page.html")
    assert done.code == 2 and "page.html exists" in done.err and "--force" in done.err
    assert page.read_text() == "mine"
    assert cli("report", str(run.path), "-o", str(desk.home)).out == f"{desk.home}/gpt-1.html\n", "a folder"
    assert cli("report", "gpt-9").code == 2


def test_the_energy_that_accounting_knows(desk: Desk, cli: Cli) -> None:
    run = write_run(desk.project / "runs" / "gpt-1")
    for name in ("scontrol", "squeue"):
        desk.program(name, "#!/bin/bash\necho Invalid job id specified >&2; exit 1\n")
    desk.program("sacct", '#!/bin/bash\n[[ $* != *Energy* ]] || printf "7|3600000\\n7.0|3500000\\n7|7200000\\n"\n')
    assert written(cli, desk, str(run.path)).after("Energy") == "3 kWh (sacct)"


# --- curves


def lines(path: Path, rows: Sequence[Sequence[Any]]) -> Path:
    path.write_text("".join(json.dumps({"time": 1.0, "step": step, "loss": loss}) + "\n" for step, loss in rows))
    return path


def test_a_long_curve_keeps_its_least_and_greatest_value(tmp_path: Path) -> None:
    path = lines(tmp_path / "m", [(step, {777: -5.0, 1234: 99.0}.get(step, 1.0)) for step in range(1, 20_001)])
    (curve,) = read_curves(path, ["loss"]).values()
    assert len(curve) <= 400 and curve[-1].step == 20_000
    assert [point.step for point in curve] == sorted({point.step for point in curve})
    assert (min(point.low for point in curve), max(point.high for point in curve)) == (-5.0, 99.0)
    assert curve[-1] == Point(20_000, 1.0, 1.0, 1.0)


def test_of_steps_that_were_trained_again_the_later_lines_count(tmp_path: Path) -> None:
    path = lines(tmp_path / "m", [(1, 1.0), (2, 2.0), (3, None), (4, 4.0), (3, 30.0), (4, 40.0), (5, 50.0)])
    path.write_text(path.read_text() + '{"step": 6, "loss": 6.0}')  # is being written
    curve = read_curves(path, ["loss", "mfu"])
    assert [(point.step, point.mean) for point in curve["loss"]] == [(1, 1), (2, 2), (3, 30), (4, 40), (5, 50)]
    assert curve["mfu"] == [] and read_curves(tmp_path / "absent", ["loss"]) == {"loss": []}


@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [5.0, 5.0],
        [0.0, 5e-324],
        [-1e11, 1e11],
        [1e11, 1e11 + 1e-4],
        [0.1, 0.30000000000000004],
        [1e-9, 5.0],
        [2.0, 41.0],
    ],
)
def test_every_curve_has_an_axis(values: list[float]) -> None:
    chart = line_chart("Loss", {"a": [Point(step, value, value, value) for step, value in enumerate(values)]})
    assert chart is not None and 2 <= len(chart.y) <= 7 and len({tick.text for tick in chart.x}) == len(chart.x)
    places = [float(number) for pair in chart.lines[0].path.split() for number in pair.split(",")]
    assert all(-0.1 <= place <= 1000.1 for place in places)


# --- in a browser


@pytest.mark.long
def test_in_chromium(desk: Desk, cli: Cli, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium: apt-get install chromium")
    run = write_run(desk.project / "runs" / "gpt-1", evil=EVIL + "<img src=x onerror=alert(1)>")
    written(cli, desk, str(run.path))
    # A script of the frame around it measures the page: the page itself may run none.
    frame = desk.write(
        "frame.html",
        "<body><iframe src=page.html style='width:390px;height:4000px;border:0'></iframe><script>onload = () => {"
        "const page = document.querySelector('iframe').contentDocument, root = page.documentElement;"
        "const s = page.querySelector('svg');"
        "document.title = [root.scrollWidth, root.clientWidth, Math.round(s.getBoundingClientRect().height),"
        "page.querySelectorAll('script, img').length, getComputedStyle(page.body).backgroundColor].join(' ')}</script>",
    )
    for scheme, colour in ((1, "rgb(255, 255, 255)"), (0, "rgb(13, 17, 23)")):
        done = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom",
             "--allow-file-access-from-files", f"--user-data-dir={tmp_path}/chromium",
             f"--blink-settings=preferredColorScheme={scheme}", frame.as_uri()],
            capture_output=True, text=True, timeout=240, check=True,
        )  # fmt: skip
        (title,) = re.findall("<title>(.*?)</title>", done.stdout)
        width, room, height, foreign, *back = title.split(maxsplit=4)
        assert int(width) <= int(room) == 390, "nothing but tables scrolls sideways"
        assert int(height) >= 150 and foreign == "0" and back == [colour]
