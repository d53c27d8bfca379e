"""`slurmddp --host user@login ...`: copies the project to a login node, and runs the command there, over OpenSSH.

The ssh of this machine makes the connection, with the user's configuration of ssh. All commands share one connection.
"""

import argparse
import hashlib
import os
import re
import shlex
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from slurmddp.commands import options as opt
from slurmddp.commands.debug.port import forward, listen, say_address
from slurmddp.commands.listed import BY_NAME, Listed
from slurmddp.commands.terminal import Progress, write_new
from slurmddp.errors import ExternalError, UserError
from slurmddp.job.document import read_file
from slurmddp.job.resolve import REMOTE_DIR
from slurmddp.run.snapshot import copy_project
from slurmddp.run.survey import DEFAULT_LIMIT, Survey, survey
from slurmddp.run.version import version
from slurmddp.shared.units import human
from slurmddp.sites.catalogue import config_files
from slurmddp.styled import labelled

_DEFAULT_PARENT = "~/slurmddp"
#: Of a project, uncompressed. The job's own snapshot_limit holds on the login node.
_LIMIT = 10 * DEFAULT_LIMIT
#: A host, or a Host of ssh's configuration: neither ssh nor rsync reads it as anything else.
_HOST = re.compile(r"(?:\w[\w.+%-]*@)?\w[\w.-]*", re.ASCII)
#: A folder on the login node: below a variable there, absolute, or below the home folder.
_FOLDER = re.compile(r"(?:~|\$(?P<name>\w+)|\$\{(?P<braced>\w+)\})(?P<rest>(?:/.*)?)")
#: A path that rsync may hand to a shell without quotes.
_PLAIN = re.compile(r"[\w./@+,=-]*")
#: What the login node sends of a report: its path there, of which only the name counts, and the page.
_REPORT = re.compile(rb"[^\0]*\0[^\0]*/(?P<name>\w[\w.+-]*\.html)\0(?P<html>.*)", re.DOTALL)
#: Bytes of a socket's path (104 on macOS), less what ssh adds: %C, and a suffix while it makes the socket.
_LONGEST = 104 - 41 - 18
_LOST = 255  # exit code of ssh if the connection failed
_NOT_COPIED = "the copy of the project is incomplete\n  -> run the command again"
#: The login node's shell, whichever it is, starts bash with the user's login files, which make PATH. What they print
#: goes to stderr.
_LOGIN_SHELL = 'exec bash -lc "$@" 3>&1 1>&2'
#: Runs there, on one line and without exclamation marks: csh quotes neither. Its own exit code is never 255.
_SCRIPT = " ".join(
    r"""
exec 1>&3 3>&-; unset SLURMDDP_HOST;
mode=$1 host=$2 version=$3 variable=$4 folder=$5; shift 5;
for program in slurmddp ~/.local/bin/slurmddp ~/venvs/slurmddp/bin/slurmddp "";
do command -v "$program" >/dev/null && break; done;
if [[ -z $program ]]; then
printf "slurmddp: slurmddp is not installed on %s (not in PATH, ~/.local/bin or ~/venvs/slurmddp/bin)\n" "$host";
printf "  -> install it: ssh %s 'python3 -m venv ~/venvs/slurmddp &&" "$host";
printf " ~/venvs/slurmddp/bin/pip install git+URL' (URL: the address of its git repository)\n"; exit 2; fi >&2;
if [[ $version ]]; then there=$("$program" --version </dev/null); [[ $there == "$version" ]] ||
printf "slurmddp: warning: %s has version %s, this machine %s: use the same\n" "$host" "$there" "$version" >&2; fi;
if [[ $variable ]]; then base=$(printenv "$variable") || {
printf "slurmddp: \$%s is not set on %s\n  -> name another folder in remote_dir or --remote-dir\n" "$variable" "$host";
exit 2; } >&2; folder=$base$folder; fi;
if [[ $mode == copy ]]; then umask 077; mkdir -p -- "$folder" && cd -- "$folder" || exit 1;
list=$PWD.copied; cat >"$list.new" || exit 1;
[[ -e $list ]] && LC_ALL=C comm -z -23 "$list" "$list.new" | xargs -0 rm -f --;
mv -- "$list.new" "$list" && printf "\0%s" "$PWD"; exit; fi;
cd -- "$folder" 2>/dev/null || cd;
[[ $mode == submit ]] && trap "" HUP;
if [[ $mode == report ]]; then pages=$(mktemp -d) && path=$("$program" "$@" -o "$pages") &&
printf "\0%s\0" "$path" && cat -- "$path"; code=$?; rm -r -- "$pages";
else "$program" "$@"; code=$?; fi;
exit $((code == 255 ? 1 : code))
""".strip().splitlines()
)


class ConnectionLost(ExternalError):
    """ssh failed, not the command: what became of the command is unknown."""

    exit_code = _LOST


class Asked(NamedTuple):
    """The options before the command, and the command itself."""

    host: str
    remote_dir: str | None
    words: list[str]


def asked(words: Sequence[str], environment: Mapping[str, str]) -> Asked | None:
    """Return what `slurmddp WORDS` asks of a login node; None if it runs here. Raises UserError."""
    given: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].partition("=")[0] in ("--host", "--remote-dir"):
        name, equals, value = rest.pop(0).partition("=")
        if not equals:
            if not rest:
                raise UserError(f"{name} needs a value", todo="for example --host user@login.example.org")
            value = rest.pop(0)
        given[name] = value
    host = given.get("--host", environment.get("SLURMDDP_HOST", ""))
    arguments = rest[: rest.index("--")] if "--" in rest else rest
    if not rest or rest[0].startswith("-") or "-h" in arguments or "--help" in arguments:
        return None  # help and version are those of this machine
    if not host and not given:
        return None
    where = "--host" if "--host" in given else "SLURMDDP_HOST"
    if not host:
        raise UserError("no login node given", where=where, todo="add --host user@login, or export SLURMDDP_HOST")
    if not _HOST.fullmatch(host):
        raise UserError(f"{host!r} is not a host", where=where, todo="write user@login; a port goes to ~/.ssh/config")
    if _listed(rest[0]).host == "refuse":
        todo = f"run it without --host: SLURMDDP_HOST= {shlex.join(['slurmddp', *rest])}"
        raise UserError(f"`slurmddp {rest[0]}` writes a file of your project, which is on this machine", todo=todo)
    return Asked(host, given.get("--remote-dir"), rest)


def run(asked: Asked, environment: Mapping[str, str]) -> int:
    """Run the command on the login node; its exit code. Raises UserError, and ExternalError if a connection fails."""
    command = asked.words[0]
    login = _Login(asked.host, _sockets(environment), *_folder(asked.remote_dir, environment))
    known = _listed(command)
    copies = known.host == "copy"
    project = _surveyed(asked.words) if copies else None
    login.connect()
    if project is not None and (code := _copy(login, project)):
        return code
    again = "runs" if copies or known.submits else shlex.join(asked.words)
    lost = (
        f"the result of `slurmddp {command}` is unknown\n"
        f"  -> submitted jobs continue. Look again: slurmddp --host {asked.host} {again}"
    )
    if command == "report":
        return _report(login, asked.words[1:], lost)
    if asked.words[:2] == ["debug", "port"] and _forward(login, asked.words[2:]):
        return 0
    mode = "submit" if known.submits else "run"
    checked = "" if copies else version()
    return login.session(
        mode, asked.words, checked, lost, terminal=sys.stdin.isatty() and sys.stdout.isatty()
    ).returncode


def _listed(command: str) -> Listed:
    """Return what is known of a command; of one that is not ours, the login node says what is wrong."""
    return BY_NAME.get(command, Listed(command, "", ""))


class _Login(NamedTuple):
    """A login node, and the folder of this project on it: below $VARIABLE, or absolute without one."""

    host: str
    sockets: Path
    variable: str
    folder: str

    @property
    def ssh(self) -> list[str]:
        """ssh with the shared connection. The rest comes from the user's configuration of ssh."""
        path = f"-oControlPath={self.sockets}/%C"
        return ["ssh", "-oControlMaster=auto", path, "-oControlPersist=1h", "-oServerAliveInterval=15"]

    def connect(self) -> None:
        """Log in, unless an earlier command has. ssh asks on the terminal for passwords and second factors."""
        check = [*self.ssh, "-O", "check", "--", self.host]
        try:
            if subprocess.run(check, capture_output=True, check=False).returncode == 0:
                return
        except FileNotFoundError:
            raise UserError("ssh is not installed on this machine", todo="install OpenSSH") from None
        if subprocess.run([*self.ssh, "-fN", "--", self.host], check=False).returncode:
            raise ConnectionLost(
                f"cannot connect to {self.host}: see the message of ssh above\n  -> try: ssh {self.host}"
            )

    def session(
        self,
        mode: str,
        words: Sequence[str],
        version: str,
        lost: str,
        *,
        terminal: bool = False,
        text: bytes | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run _SCRIPT. With `text` as its standard input, or in mode report, its output is returned.

        lost: what to say if the connection fails. Raises ConnectionLost.
        """
        keep = subprocess.PIPE if text is not None or mode == "report" else None
        command = self.command(mode, words, version, terminal=terminal)
        done = subprocess.run(command, input=text, stdout=keep, check=False)
        if done.returncode == _LOST:
            raise ConnectionLost(f"the connection to {self.host} was lost: {lost}")
        return done

    def command(self, mode: str, words: Sequence[str], version: str, *, terminal: bool = False) -> list[str]:
        """Return the command line that runs _SCRIPT."""
        facts = (mode, self.host, version, self.variable, self.folder)
        plain = ["env", "NO_COLOR=1"] if terminal and os.environ.get("NO_COLOR") else []  # ssh sends TERM alone
        there = shlex.join([*plain, "sh", "-c", _LOGIN_SHELL, "sh", _SCRIPT, "slurmddp", *facts, *words])
        # The level leaves out "Shared connection closed".
        return [*self.ssh, "-oLogLevel=ERROR", "-t" if terminal else "-T", "--", self.host, there]

    def rsync(self, source: str, folder: str) -> None:
        """Copy what is below a folder here into a folder there, by content. Raises UserError, ExternalError."""
        if not _PLAIN.fullmatch(folder):
            raise UserError(f"{folder!r} on {self.host} has spaces or quotes", todo="choose another --remote-dir")
        command = ["rsync", "-rlpc", "--rsh", " ".join(self.ssh), f"{source}/", f"{self.host}:{folder}/"]
        try:
            done = subprocess.run(command, check=False, stdout=subprocess.PIPE)
        except FileNotFoundError:
            raise UserError("rsync is not installed on this machine", todo="install rsync") from None
        if done.returncode == _LOST:
            raise ConnectionLost(f"the connection to {self.host} was lost: {_NOT_COPIED}")
        if done.returncode:
            raise ExternalError(
                f"rsync to {self.host}:{folder} failed with exit code {done.returncode}: see its message above\n"
                "  -> both machines need rsync, and the folder needs space"
            )


def _surveyed(words: Sequence[str]) -> Survey:
    """Return what a snapshot of the current folder would copy. Raises UserError."""
    try:
        project = survey(Path.cwd(), limit=_LIMIT)
    except UserError as error:
        todo = "start in the folder of your project, or let its .gitignore name what is no code"
        raise UserError(error.what, where="--host", todo=todo) from None
    for warning in project.warnings:
        opt.say(labelled("warning", warning))
    names = {item.relative for item in project.items}
    for word in words:
        if word.endswith((".yaml", ".yml", ".py")) and os.path.isfile(word) and os.path.relpath(word) not in names:
            opt.say(labelled("warning", f"{word} is not copied: git ignores it, or it is outside of this folder"))
    return project


def _copy(login: _Login, project: Survey) -> int:
    """Copy the project, and remove there what was copied before and is gone here. Return the exit code."""
    names = {item.relative for item in project.items}
    with tempfile.TemporaryDirectory(prefix="slurmddp-") as temporary:
        copy_project(project, Path(temporary))
        listed = b"".join(sorted(os.fsencode(name) + b"\0" for name in names))
        done = login.session("copy", (), version(), _NOT_COPIED, text=listed)
        if done.returncode:
            return done.returncode
        folder = os.fsdecode(done.stdout.rpartition(b"\0")[2])
        if not folder.startswith("/"):
            raise ExternalError(f"{login.host} did not say where the copy of the project goes: {_NOT_COPIED}")
        with Progress() as progress:
            files = "file" if len(names) == 1 else "files"
            progress.tell(f"copying {len(names)} {files} ({human(project.size)}) to {login.host}")
            login.rsync(temporary, folder)
    opt.say(f"copied  {len(names)} files ({human(project.size)}) to {login.host}:{folder}")
    return 0


def _report(login: _Login, words: Sequence[str], lost: str) -> int:
    """Make the report there, write it here, and print its path. Return the exit code."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-o", "--output")
    parser.add_argument("--force", action="store_true")
    ours, rest = parser.parse_known_args(words)
    done = login.session("report", ["report", *rest], version(), lost)
    if done.returncode == 0:
        page = _REPORT.fullmatch(done.stdout)
        if not page:  # a name of its choice would be a file of its choice
            raise ExternalError(f"{login.host} sent no report\n  -> is slurmddp there as new as here?")
        html, path = page["html"], Path(ours.output or "")
        path = path / page["name"].decode() if path.is_dir() else path
        todo = "choose another name with -o, or add --force"
        write_new(path, html.decode("utf-8", errors="surrogateescape"), force=ours.force, todo=todo)
        print(path)
    return done.returncode


def _forward(login: _Login, words: Sequence[str]) -> bool:
    """Accept connections here; the command there is the stream to the job's node. False if its words are wrong."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("run", "port"):
        parser.add_argument(name, nargs="?")
    for option in ("--node", "--local-port"):
        parser.add_argument(option)
    ours, rest = parser.parse_known_args(words)
    port = ours.local_port or ours.port or ""
    if rest or not port.isdecimal() or not 0 < int(port) < 65536:
        return False  # the command says there what is wrong
    accepts = listen(int(port))
    node = ("--node", ours.node) if ours.node else ()
    there = login.command("run", ["debug", "port", ours.run, ours.port, *node, "--stdio"], version())
    forward(accepts, there, None, lambda: say_address(accepts))
    return True


def _folder(given: str | None, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the variable and the path below it of this project's folder on the login node. Raises UserError."""
    parent, where = given, "--remote-dir"
    for path in () if given is not None else config_files(environment):
        document = read_file(path, "configuration")
        if REMOTE_DIR in document.tree:
            parent, where = str(document.tree[REMOTE_DIR]), f"{path}: {REMOTE_DIR}"
    parent = _DEFAULT_PARENT if parent is None else parent
    below = _FOLDER.fullmatch(parent)
    variable, rest = (below["name"] or below["braced"] or "HOME", below["rest"]) if below else ("", parent)
    if not below and not parent.startswith("/"):
        variable, rest = "HOME", f"/{parent}"
    if not parent or not _PLAIN.fullmatch(rest):
        todo = "write for example $WORK/slurmddp: no spaces or quotes"
        raise UserError(f"{parent!r} is not a folder for copies", where=where, todo=todo)
    project = os.getcwd()
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", os.path.basename(project))[:40]
    return variable, f"{rest.rstrip('/')}/{name}-{hashlib.sha256(os.fsencode(project)).hexdigest()[:8]}"


def _sockets(environment: Mapping[str, str]) -> Path:
    """Return the folder of ssh's sockets, which nobody else can enter. Raises UserError."""
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime, "slurmddp")
    if not os.path.isdir(runtime) or len(os.fsencode(folder)) > _LONGEST or not _PLAIN.fullmatch(str(folder)):
        folder = Path(f"/tmp/slurmddp-ssh-{os.getuid()}")
    try:
        folder.mkdir(0o700, exist_ok=True)
        facts = folder.lstat()
    except OSError as error:
        todo = "set XDG_RUNTIME_DIR to another folder"
        raise UserError(f"{folder} cannot be made: {error.strerror}", todo=todo) from None
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        todo = "remove it, or set XDG_RUNTIME_DIR to another folder"
        raise UserError(f"{folder}, for the sockets of ssh, is not a folder that only you can enter", todo=todo)
    return folder
