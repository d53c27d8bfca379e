"""From the job's alerts and the site's profile to the plan: names, filters, mail, the watchdog job."""

from pathlib import Path

import pytest

from slurmddp.cluster.base import JobId
from slurmddp.errors import UserError
from slurmddp.job.alerts import KINDS
from slurmddp.launch.submit import submit_watchdog
from slurmddp.render.scripts import alert_files
from slurmddp.run.gate import own
from slurmddp.run.layout import RunFolder
from tests.helpers import Desk, refusal

JOB = "name: gpt\nsite: %s\ntrain: {script: train.py}\nresources: {time: 1h}\nalerts: [%s]\n"


@pytest.fixture(autouse=True)
def script(desk: Desk) -> None:
    desk.write("train.py")


def site(desk: Desk, more: str) -> None:
    desk.site(f"name: told\ntitle: t\nbases: [cores]\n{more}\n")


def test_nobody_is_told_by_default(desk: Desk) -> None:
    plan = desk.plan(JOB % ("cores", ""))
    assert (plan.alerts, plan.watchdog) == (None, None)
    assert alert_files(plan) == {}


def test_a_target_says_little(desk: Desk) -> None:
    plan = desk.plan(JOB % ("cores", "{to: slack}, {to: slack, name: team, on: [failed], url_file: hook}"))
    assert plan.alerts is not None
    first, second = plan.alerts.targets
    assert first.name == "slack" and first.on == KINDS[1:] and first.url_file is None
    assert second.name == "team" and second.on == ("failed",) and second.url_file == str(desk.project / "hook")
    assert plan.alerts.leave == "node"


def test_a_later_layer_adds_targets(desk: Desk) -> None:
    (desk.config / "config.yaml").write_text("alerts: [{to: ntfy}]\n")
    plan = desk.plan(JOB % ("cores", "{to: slack}"))
    assert plan.alerts is not None and [target.to for target in plan.alerts.targets] == ["ntfy", "slack"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{to: pager}", "alerts.0.to"),
        ("{to: slack, on: [crashed]}", "on"),
        ("{to: slack, url: https://hooks.example.com/SECRET}", "url"),
        ("{to: slack}, slack", "-> example of an entry: {to: slack"),
        ("{name: team}", "-> example of an entry: {to: slack"),
        ("{to: slack, url_env: A, url_file: b}", "has both url_env and url_file"),
        ("{to: slack, address: a@b}", "only mail may have"),
        ("{to: mail, url_env: A}", "which Slurm sends"),
        ("{to: slack}, {to: slack}", "two targets called slack"),
        ("{to: mail, address: a@b}, {to: mail, address: c@d}", "one list of addresses"),
        ("{to: slack, name: ../x}", "letters, digits"),
        ("{to: mail, address: 'a b'}", "does not accept"),
    ],
)
def test_a_mistake_is_told(desk: Desk, entry: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        desk.plan(JOB % ("cores", entry))
    assert words in refusal(error.value) and "job.yaml" in refusal(error.value)


@pytest.mark.parametrize("key", ["url", "webhook", "url_env", "url_file", "address", "name"])
def test_an_address_in_the_job_file_is_refused_and_not_shown(desk: Desk, key: str) -> None:
    with pytest.raises(UserError) as error:
        desk.plan(JOB % ("cores", f"{{to: slack, {key}: 'https://hooks.example.com/SECRET'}}"))
    shown = refusal(error.value)
    assert "job.yaml:5: alerts.0 contains the address itself" in shown and "url_env" in shown
    assert "SECRET" not in shown


def test_mail_is_slurms_business(desk: Desk) -> None:
    plan = desk.plan(JOB % ("cores", "{to: mail, address: 'a@b.org,c', on: [started, hang, failed, finished]}"))
    assert [line for line in plan.sbatch if "mail" in line] == ["--mail-type=BEGIN,FAIL,END", "--mail-user=a@b.org,c"]
    assert plan.alerts is None, "no script of ours sends mail"
    with pytest.raises(UserError, match="send mail for hang, recovered"):
        desk.plan(JOB % ("cores", "{to: mail, on: [hang, recovered]}"))
    site(desk, "unsupported_flags: [--mail-type]")
    with pytest.raises(UserError, match="rejects jobs with --mail-type"):
        desk.plan(JOB % ("told", "{to: mail}"))


@pytest.mark.parametrize(
    ("more", "leave"),
    [
        ("", "node"),
        ("internet_on_nodes: true", "node"),
        ("internet_on_nodes: false", "login"),
        ("internet_on_nodes: false\nalerts: {from: node}", "node"),
        ("alerts: {from: proxy, proxy: 'http://proxy:3128'}", "proxy"),
        ("alerts: {from: login}", "login"),
    ],
)
def test_where_messages_leave_from(desk: Desk, more: str, leave: str) -> None:
    site(desk, more)
    plan = desk.plan(JOB % ("told", "{to: slack}"))
    assert plan.alerts is not None and plan.alerts.leave == leave
    assert any("alert watch" in note.text for note in plan.notes) == (leave == "login")


@pytest.mark.parametrize(
    "more", ["{from: proxy}", "{proxy: 'http://p:1'}", "{from: proxy, proxy: 'http://me:pw@p:1'}", "{from: moon}"]
)
def test_a_profile_that_cannot_be_meant(desk: Desk, more: str) -> None:
    site(desk, f"alerts: {more}")
    with pytest.raises(UserError):
        desk.plan(JOB % ("told", "{to: slack}"))


#: Stands for sbatch: writes down its words.
SBATCH = '#!/bin/bash\nprintf "%s\\n" "$@" >"${0%/*}/words"\necho 8\n'


def test_the_dead_man_job_asks_for_what_the_profile_says(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    site(desk, "watchdog: {partition: debug, time: 10m, account: ops, sbatch: [--qos=small, --mem=100M]}")
    plan = desk.plan(JOB % ("told", "{to: slack}"))
    assert plan.watchdog is not None
    assert plan.watchdog == (
        "--job-name=gpt-watchdog", "--partition=debug", "--time=00:10:00", "--account=ops",
        "--nodes=1", "--ntasks=1", "--qos=small", "--mem=100M",
    )  # fmt: skip
    desk.program("sbatch", SBATCH)
    monkeypatch.setenv("PATH", desk.environment["PATH"])
    folder = RunFolder(desk.root / "run")
    folder.logs.mkdir(parents=True)
    assert submit_watchdog(plan, own(folder, to="submit it"), JobId("7")) is None
    words = (desk.bin / "words").read_text().splitlines()
    script = words.index(str(folder.python_sh))
    assert {*plan.watchdog, "--open-mode=append", "--dependency=afterany:7"} <= set(words[:script])
    python, program, *arguments = words[script + 1 :]
    assert Path(python).is_file() and program == str(folder.code_archive)
    assert arguments == ["watchdog", str(folder.path), "7", python, *plan.watchdog]


@pytest.mark.parametrize("targets", ["", "{to: mail}", "{to: slack, on: [finished]}"])
def test_no_dead_man_job_where_nobody_would_hear_of_it(desk: Desk, targets: str) -> None:
    site(desk, "watchdog: {partition: debug}")
    assert desk.plan(JOB % ("told", targets)).watchdog is None
    assert desk.plan(JOB % ("told", "{to: slack}"), inside=True).watchdog is None


def test_the_resolved_job_names_no_address_and_reads_back(desk: Desk) -> None:
    from slurmddp.render.documents import job_yaml

    text = JOB % ("cores", "{to: slack, url_env: HOOK, on: [failed]}, {to: ntfy, name: phone, url_file: ~/phone}")
    resolved = desk.resolve(text, HOOK="https://hooks.example.com/SECRET")
    plan = desk.plan(text, HOOK="https://hooks.example.com/SECRET")
    again = job_yaml(resolved, plan)
    assert "SECRET" not in again
    assert desk.plan(again.split("\n", 1)[1]).alerts == plan.alerts
