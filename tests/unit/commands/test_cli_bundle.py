"""slurmddp debug bundle: what support needs, in one bounded archive, and no secret in it."""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.commands.debug import bundle
from slurmddp.records.submission import now as submitted_now
from slurmddp.run import submission
from slurmddp.run.gate import own
from slurmddp.run.layout import RunFolder
from tests.checkpoints import make_run
from tests.helpers import Desk, Result, append_event

Cli = Callable[..., Result]

KEY = "\n".join("MIIEpAIBAAKCAQEAx7Qw3Zr9Tn5Lb2Vy8Kc4Hd6Jf1Gs0Pm"[: 40 + index % 5] for index in range(60))
#: What stands in the logs; each has a word that only it has.
IN_LOGS = {
    "HF_TOKEN=planted-one": "planted-one",
    '{"api_key": "planted two words"}': "planted two",
    "PASSWORD: planted three words": "planted three",
    "main.py --wandb-api-key planted-four --lr 3": "planted-four",
    '["--auth-token", "planted-five"]': "planted-five",
    "args:\n- --secret\n- planted-six\n": "planted-six",
    "Authorization: Bearer planted-seven": "planted-seven",
    "https://me:planted-eight@host.org/x": "planted-eight",
    "https://planted-nine@host.org/x": "planted-nine",
    "curl https://hooks.slack.com/services/T0AB/B0CD/plantedTen0123456789ab": "plantedTen",
    "login ghp_plantedEleven0123456789abcdefghij0123456789": "plantedEleven",
    f"-----BEGIN PRIVATE KEY-----\n{KEY}\n-----END PRIVATE KEY-----": "MIIEpAIBAAKC",
    "AWS_SECRET_ACCESS_KEY='planted twelve'": "planted twelve",
    "export MY_PASSWD=planted-13": "planted-13",
}


@pytest.fixture
def run(desk: Desk) -> RunFolder:
    """A failed run of job 7 with secrets in all that was written about it."""
    folder = make_run(desk.project / "runs" / "gpt-1")
    submission.write(own(folder, to="write"), submitted_now("7", "slurm", ("sbatch", "--export=HF_TOKEN=planted-argv")))
    append_event(folder.events, "job_started", attempt=0, job_id="7", node="node1", nodes="node1")
    append_event(folder.events, "attempt_ended", attempt=0, cause="login with address-of-alert failed", node="node1")
    folder.job_yaml.write_text(
        "environment:\n  HF_TOKEN: planted-yaml\ntrain:\n  args:\n  - --api-key\n  - planted-arg\n"
    )
    folder.job_sh.write_text("#!/bin/bash\nexport A=kept-value\n")
    folder.key.write_text("rendezvous-key")
    folder.attempt_logs(0).mkdir(parents=True, exist_ok=True)
    log = "ValueError: boom value-of-the-shell value-of-the-run\n" + "\n".join(IN_LOGS) + "\n"
    (folder.attempt_logs(0) / "node1.log").write_text(log)
    (folder.attempt_logs(0) / "node2.log").write_text(
        f"-----BEGIN PRIVATE KEY-----\n{(KEY + chr(10)) * 30}" + f"{KEY}\n-----END PRIVATE KEY-----\n" + "x\n" * 150_000
    )
    (folder.attempt_logs(0) / "dump.bin").write_bytes(b"\0planted-binary")
    (desk.root / "outside").write_text("planted-outside")
    (folder.attempt_logs(0) / "link.log").symlink_to(desk.root / "outside")
    (folder.attempt_logs(0) / "srun.err").touch()
    kept = desk.config / "secrets" / folder.id
    kept.mkdir(parents=True)
    (kept / "slack").write_text("https://example.org/address-of-alert\n")
    (kept / ".environment").write_text("WANDB_API_KEY=value-of-the-run\0")
    for name in ("scontrol", "sacct", "squeue", "sinfo"):
        desk.program(name, f"#!/bin/sh\necho {name} says JobId=7 JobState=FAILED token=planted-slurm\n")
    return folder


def packed(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        names = [each.name for each in archive.getmembers()]
        assert all(each.isfile() and each.mode == 0o600 for each in archive.getmembers())
        texts = {name: archive.extractfile(name) for name in names}
        return {name.partition("/")[2]: file.read().decode() for name, file in texts.items() if file}


def test_it_has_what_support_needs_and_no_secret(run: RunFolder, desk: Desk, cli: Cli) -> None:
    secrets = {"MY_API_KEY": "value-of-the-shell"}
    done = cli("debug", "bundle", str(run.path), **secrets)
    path = desk.project / "gpt-1-bundle.tar.gz"
    assert (done.code, done.out) == (0, f"{path}\n"), done.err
    assert path.stat().st_mode & 0o777 == 0o600
    files = packed(path)
    assert files.keys() >= {
        "CONTENTS", "versions.txt", "status.json", "doctor.txt", "slurm/job.txt", "slurm/nodes.txt",
        "manifest.json", "submission.json", "job.yaml", "job.sh", "events.jsonl", "logs/attempt-000/node1.log",
    }  # fmt: skip
    everything = "\n".join((*files, *files.values()))
    for planted in ("planted", "value-of-the", "address-of-alert", "rendezvous-key", "MIIEpAIBAAKC", "Hd6Jf1Gs0Pm"):
        assert planted not in everything, planted
    assert "export A=kept-value" in files["job.sh"] and "scontrol says JobId=7" in files["slurm/job.txt"]
    assert (
        "ValueError: boom" in files["logs/attempt-000/node1.log"] and json.loads(files["status.json"])["job_id"] == "7"
    )
    assert "ValueError" in files["doctor.txt"] and files["versions.txt"].startswith("slurmddp ")
    assert len(files["logs/attempt-000/node2.log"]) <= 256 * 1024
    for name in files.keys() - {"CONTENTS"}:
        assert f"  {name}" in done.err and f"  {name}" in files["CONTENTS"]
    assert "node2.log, the end of " in done.err
    assert "not packed: logs/attempt-000/link.log: it is a link" in done.err
    assert "not packed: logs/attempt-000/dump.bin: it is no text" in done.err
    assert "srun.err" not in done.err + files["CONTENTS"], "an empty file is no news"


def test_its_size_is_bounded_and_the_newest_attempt_comes_first(
    run: RunFolder, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "_ALL_BYTES", 2**20)
    for attempt in range(1, 3):
        run.attempt_logs(attempt).mkdir(parents=True)
        for node in range(5):
            (run.attempt_logs(attempt) / f"node{node}.log").write_text(f"{attempt}\n" * 200_000)
    done = cli("debug", "bundle", str(run.path), "-o", "b.tar.gz", "--json")
    told = json.loads(done.out)
    assert sum(each["size"] for each in told["files"]) <= 2**20
    names = [each["name"] for each in told["files"]]
    assert "logs/attempt-002/node0.log" in names and "logs/attempt-001/node0.log" not in names
    assert told["left_out"][-1].endswith("more files of the run: the bundle is full")


def test_it_is_made_where_slurm_does_not_answer_and_never_over_a_file(run: RunFolder, desk: Desk, cli: Cli) -> None:
    for name in ("scontrol", "sacct", "squeue", "sinfo"):
        desk.program(name, "#!/bin/sh\necho no controller >&2; exit 1\n")
    assert cli("debug", "bundle", str(run.path)).code == 0
    assert "no controller" in packed(desk.project / "gpt-1-bundle.tar.gz")["slurm/queue.txt"]
    refused = cli("debug", "bundle", str(run.path))
    assert refused.code == 2 and "gpt-1-bundle.tar.gz exists" in refused.err
