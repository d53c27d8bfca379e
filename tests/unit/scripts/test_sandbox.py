"""What a hostile script can do in the sandbox: nothing. Each attack is made, and its effect is looked for outside."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurmddp.scripts.sandbox import evaluate as sandbox
from slurmddp.scripts.sandbox.evaluate import LIMITS, Job, Limits, available, evaluate

needs_namespaces = pytest.mark.skipif(not available(), reason="this machine gives no user namespaces")
JOB = Job(4242001, ("a1", "a2"), "a[1-2]", 1, 4, True, 1700000000, 23456)
SHORT = Limits(seconds=0.4, processor=1)
SECRET = "hunter2-of-the-caller"

ATTACKS = {
    "write": 'echo x >"@DIR/hit"',
    "append": 'echo x >>"@DIR/kept"',
    "truncate": ': >"@DIR/kept"',
    "remove": 'rm -rf "@DIR" 2>/dev/null; rmdir "@DIR"',
    "move": 'mv "@DIR/kept" "@DIR/hit"',
    "copy over": 'cp /dev/null "@DIR/kept"',
    "tee": 'echo x | tee "@DIR/kept" "@DIR/hit"',
    "sed in place": 'sed -i s/./x/ "@DIR/kept"',
    "sed w": 'echo x | sed -n "w @DIR/hit"',
    "awk file": "awk 'BEGIN { print 1 >\"@DIR/hit\" }'",
    "awk system": "awk 'BEGIN { system(\"echo x >@DIR/hit\") }'",
    "sort -o": 'echo x | sort -o "@DIR/kept"',
    "find -delete": 'find "@DIR" -delete',
    "xargs": 'echo "@DIR/hit" | xargs touch',
    "eval": "eval 'echo x' '>' '@DIR/hit'",
    "no traps": 'builtin trap - DEBUG; set +T; echo x >"@DIR/hit"',
    "no functions": 'unset -f cd source command_not_found_handle; cd "@DIR" && echo x >hit',
    "builtins off": 'enable -n trap cd [ test; /usr/bin/touch "@DIR/hit"',
    "path": 'PATH=/bin:/usr/bin:/sbin:/usr/local/bin; hash -r; touch "@DIR/hit"',
    "command -p": 'command -p touch "@DIR/hit"; command -p rm -rf "@DIR"',
    "env -i": 'env -i PATH=/usr/bin:/bin bash -c \'echo x >"@DIR/hit"\'',
    "bash -p": "/bin/bash -p -c 'echo x >@DIR/hit'",
    "loader": "/lib64/ld-linux-x86-64.so.2 /usr/bin/touch @DIR/hit",
    "subshell in the background": '( ( sleep 0; echo x >"@DIR/hit" ) & )',
    "exit trap": 'trap \'echo x >"@DIR/hit"\' EXIT TERM HUP',
    "coproc": 'coproc { echo x >"@DIR/hit"; }; wait',
    "substitution": 'cat <(echo x >"@DIR/hit") > >(tee "@DIR/hit")',
    "here-document": 'bash <<EOF\necho x >"@DIR/hit"\nEOF',
    "loadable": "enable -f /usr/lib/bash/mkdir mkdir && mkdir @DIR/hit",
    "own kill": "kill -9 @PID; kill -9 -1; builtin kill -9 @PID",
    "kill by group": "for p in $(seq 1 400) @PID; do kill -9 -$p $p; done 2>/dev/null",
    "proc kill": "echo 1 >/proc/@PID/oom_score_adj; cat /proc/@PID/environ; ls /proc",
    "proc root": 'for p in /proc/[0-9]*; do echo x >"$p/root@DIR/hit"; echo x >"$p/cwd/@DIR/hit"; done',
    "proc memory": "echo x >/proc/1/mem; cat /proc/1/maps; cat /proc/1/environ /proc/1/fd/*",
    "sysctl": "echo x >/proc/sys/kernel/hostname; echo b >/proc/sysrq-trigger",
    "tcp": "exec 5<>/dev/tcp/127.0.0.1/@PORT && echo x >&5",
    "udp": "echo x >/dev/udp/127.0.0.1/@PORT",
    "gawk network": 'gawk \'BEGIN { s = "/inet/tcp/0/127.0.0.1/@PORT"; print "x" |& s; close(s) }\'',
    "curl": "curl http://127.0.0.1:@PORT/; wget http://127.0.0.1:@PORT/; nc 127.0.0.1 @PORT",
    "read a file": 'export A="$(<"@DIR/secret")"; srun python "$A" "$(cat @DIR/secret)"',
    "read by link": "ln -s @DIR/secret /tmp/l; ln -s / /tmp/r; srun python $(cat /tmp/l /tmp/r@DIR/secret)",
    "record by link": "ln -s @DIR/secret /.sandbox/records/9999; ln -sf @DIR/kept /.sandbox/stderr; echo x >&2",
    "caller's environment": 'srun python "$CALLER_SECRET" "$(env)"; export A="$CALLER_SECRET"',
    "descriptors": "for i in $(seq 3 250); do cat <&$i; echo x >&$i; done 2>/dev/null",
    "history": "set -o history; HISTFILE=@DIR/hit; echo x; history -a",
    "mount": "mount -t tmpfs none @DIR; umount -a; mount -o remount,rw /usr/lib; echo x >/usr/lib/slurmddp-hit",
    "namespaces": "unshare -Ur sh -c 'echo x >@DIR/hit'; nsenter -t 1 -m sh -c 'echo x >@DIR/hit'",
    "links out": "ln /proc/1/exe @DIR/hit; cd -P /..; cd ../../../..; echo x >.@DIR/hit",
    "permissions": "chmod 777 @DIR/secret; chmod -R 000 @DIR",
    "stopped init": "for s in INT HUP QUIT TERM STOP KILL; do kill -$s 1; builtin kill -$s 1; done; sleep 0.2",
}  # fmt: skip
ENDLESS = {
    "loop": "while :; do :; done",
    "sleeping": "read -t 99999 <> <(:)",
    "fork bomb": ":() { : | : & }; :",
    "output": "while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxx; done >&2",
    "full disk": "while :; do cat /dev/zero >/tmp/$RANDOM; done",
    "records": 'for i in $(seq 100000); do srun python "$(head -c 100000 /dev/zero | tr "\\0" x)"; done',
    "memory": "A=x; while :; do A=$A$A; done",
    "recursion": "f() { f; }; f",
    "without end": "trap '' TERM HUP INT; setsid bash -c 'while :; do :; done' & disown -a; exec sleep 99",
    "itself": 'exec bash "$0"',
}


class World:
    """What an attack is after: a folder with files, a process, a listener."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        folder.chmod(0o777)
        for name, text in (("kept", "kept"), ("secret", SECRET)):
            (folder / name).write_text(text, encoding="utf-8")
            (folder / name).chmod(0o666)
        self.victim = subprocess.Popen(["/bin/sleep", "300"])
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(0.2)
        self.calls = 0
        self.open = True
        self.thread = threading.Thread(target=self._listen)
        self.thread.start()

    def _listen(self) -> None:
        while self.open:
            try:
                self.listener.accept()[0].close()
                self.calls += 1
            except TimeoutError:
                continue

    def text(self, attack: str) -> str:
        words = {"@DIR": self.folder, "@PID": self.victim.pid, "@PORT": self.listener.getsockname()[1]}
        for name, value in words.items():
            attack = attack.replace(name, str(value))
        return f"#!/bin/bash\n{attack}\n"

    def harm(self) -> list[str]:
        found = [] if sorted(each.name for each in self.folder.iterdir()) == ["kept", "secret"] else ["files"]
        if not found and (self.folder / "kept").read_text(encoding="utf-8") != "kept":
            found.append("content")
        if not found and (self.folder / "secret").stat().st_mode & 0o777 != 0o666:
            found.append("permissions")
        found += ["process"] if self.victim.poll() is not None else []
        return [*found, *["network"] * bool(self.calls)]

    def close(self) -> None:
        self.open = False
        self.thread.join()
        self.listener.close()
        self.victim.kill()
        self.victim.wait()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("CALLER_SECRET", SECRET)
    made = World(tmp_path / "world")
    yield made
    made.close()


@needs_namespaces
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_has_no_effect(world: World, name: str) -> None:
    host = socket.gethostname()
    answer = json.dumps(sandbox._run([sandbox._spec(world.text(ATTACKS[name]), JOB, "job.sbatch", {})]))
    assert world.harm() == [] and SECRET not in answer and "error" not in answer[:20]
    assert socket.gethostname() == host and not Path("/usr/lib/slurmddp-hit").exists()


@needs_namespaces
@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends_is_ended(world: World, name: str) -> None:
    own = replace(JOB, id=4_000_000 + os.getpid())  # others test beside this one
    before = time.monotonic()
    evaluate(world.text(ENDLESS[name]), [own], limits=SHORT)
    assert time.monotonic() - before < 5 and world.harm() == []  # less than LIMITS.seconds: the machine may be busy
    left = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True).stdout
    children = [line for line in left.splitlines() if line.split()[0] == str(os.getpid())]
    assert f"job{own.id}" not in left and not [line for line in children if "jail.py" in line]


@needs_namespaces
@pytest.mark.parametrize("limits", [Limits(seconds=0.4, processor=60), Limits(seconds=60, processor=1)], ids=str)
def test_each_limit_ends_a_script_by_itself(limits: Limits) -> None:
    before = time.monotonic()
    found = evaluate("#!/bin/bash\nsrun python a.py\nwhile :; do :; done\n", [JOB], limits=limits)[0]
    assert time.monotonic() - before < 15 and [each.name for each in found.started][:1] == ["srun"]
    assert not found.ended


def test_the_limits_of_users_are_those_that_are_tested() -> None:
    spec = sandbox._spec("", JOB, "job", {})
    assert (spec["seconds"], spec["processor"]) == (8, 4) == (LIMITS.seconds, LIMITS.processor)


@pytest.mark.parametrize(("name", "harm"), [("write", "files"), ("own kill", "process"), ("tcp", "network")])
def test_the_same_attack_outside_of_it_is_seen(world: World, name: str, harm: str) -> None:
    text = world.text(ATTACKS[name]).replace("kill -9 -1;", "")
    subprocess.run(["bash", "-c", text], check=False, timeout=20, stderr=subprocess.DEVNULL)
    time.sleep(0.5)
    assert harm in world.harm()


@needs_namespaces
def test_it_records_words_folder_files_and_tasks() -> None:
    text = "#!/bin/bash\ncd /scratch/me\nexport A=1\n"
    text += "srun bash -c 'B=2 ./x.py $SLURM_PROCID \"a b\"' <in.txt >out/$SLURM_JOB_ID.txt\n"
    found = evaluate(text, [JOB])[0]
    step, *tasks = found.started
    assert found.ended and step.line == 4 and step.name == "srun" and step.folder == "/scratch/me"
    assert step.streams[:2] == ("/scratch/me/in.txt", "/scratch/me/out/4242001.txt")
    assert [each.words for each in tasks] == [("./x.py", "0", "a b"), ("./x.py", "1", "a b")]
    facts = [(each.procid, each.task["SLURM_NODEID"], each.added["A"], each.added["B"]) for each in tasks]
    assert facts == [(0, "0", "1", "2"), (1, "1", "1", "2")]


@needs_namespaces
def test_a_clean_container_hides_slurm_s_variables_and_the_task_is_known() -> None:
    found = evaluate("#!/bin/bash\nsrun apptainer exec -e x.sif bash -c 'p.py \"<$SLURM_PROCID>\"'\n", [JOB])[0]
    tasks = [each for each in found.started if each.name == "p.py"]
    assert [(each.words[1], each.procid, each.task["SLURMD_NODENAME"]) for each in tasks] == [
        ("<>", 0, "a1"), ("<>", 1, "a2"),
    ]  # fmt: skip
    assert not any("SLURM_JOB_ID" in each.environment for each in tasks)


@needs_namespaces
@pytest.mark.parametrize("option", ["--add-caps CAP_SYS_NICE", "--bind /a", "--nv", "--env=A=1"])
def test_the_program_in_a_container_is_the_word_behind_the_image(option: str) -> None:
    found = evaluate(f"#!/bin/bash\napptainer exec {option} x.sif p.py --x\n", [JOB])[0]
    assert [each.words for each in found.started][1:] == [("p.py", "--x")]


@needs_namespaces
@pytest.mark.parametrize("command", ["cp /data/in.tar $T/", "mv a b", "chmod +x run.sh", "rm old", "touch /x/y/z"])
def test_a_file_that_only_the_job_has_does_not_end_a_script(command: str) -> None:
    found = evaluate(f"#!/bin/bash\nset -e\n{command}\nsrun p.py\n", [JOB])[0]
    assert [each.name for each in found.started if not each.step] == [command.split()[0], "srun"]


@needs_namespaces
def test_random_numbers_differ_by_job_and_stay_when_asked_again() -> None:
    other = replace(JOB, id=JOB.id + 1, unknown=JOB.unknown + 1)
    runs = []
    for _ in range(2):
        sandbox._known.clear()
        runs.append(evaluate("#!/bin/bash\nsrun p.py $RANDOM\n", [JOB, other]))
    words = [[each.started[0].words for each in run] for run in runs]
    assert words[0] == words[1] and words[0][0] != words[0][1]


@needs_namespaces
def test_a_run_that_was_made_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those that are new are made, whatever else is asked with them; what went wrong is tried again."""
    script, other = "#!/bin/bash\nsrun once.py\n", replace(JOB, id=JOB.id + 1)
    made: list[int] = []
    in_jail = sandbox._in_jail

    def count(specs: list[dict[str, object]]) -> list[dict[str, object]]:
        made.append(len(specs))
        return [{"error": "no memory"} for _ in specs] if len(made) == 1 else in_jail(specs)

    assert available()
    monkeypatch.setattr(sandbox, "_in_jail", count)
    for jobs in ([JOB], [JOB], [other, JOB], [JOB, other]):
        found = evaluate(script, jobs)
    assert made == [1, 1, 1] and [each.started[0].words for each in found] == [("srun", "once.py")] * 2


@needs_namespaces
def test_closed_streams_and_a_folder_of_two_lines_are_recorded() -> None:
    (found,) = evaluate("#!/bin/bash\nmkdir $'a\\nb'\ncd $'a\\nb'\nprogram <&- >/tmp/out\n", [JOB])
    last = found.started[-1]
    assert last.words == ("program",) and last.folder.endswith("/a\nb")
    assert last.streams[:2] == ("closed", "/tmp/out")


def test_assigned_values_and_folders_are_recorded_under_their_own_names() -> None:
    found = evaluate("#!/bin/bash\nexport name=run42\nexport text=hello path=/p\ncd\npushd\ntrue\n", [JOB])[0]
    assert [(name, value) for _, name, value in found.assigned] == [
        ("name", "run42"), ("text", "hello"), ("path", "/p"),
    ]  # fmt: skip


@pytest.mark.parametrize("end", ["kill -9 $$", "kill $$", "ulimit -t 1; while :; do :; done"])
def test_a_script_that_a_signal_ends_is_not_known_to_its_end(end: str) -> None:
    (found,) = evaluate(f"#!/bin/bash\nsrun a\n{end}\nsrun b\n", [JOB], limits=SHORT)
    assert not found.ended


def test_no_namespaces_means_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_run", lambda specs: [{"error": "unshare: Operation not permitted"} for _ in specs])
    sandbox._probed.cache_clear()
    try:
        assert not available()
        with pytest.raises(sandbox.Unavailable):
            evaluate("#!/bin/bash\n", [JOB])
    finally:
        monkeypatch.undo()
        sandbox._probed.cache_clear()
        assert os.environ.get("SLURMDDP_NO_SANDBOX") or available() in (True, False)
