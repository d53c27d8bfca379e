"""What a run needs and nobody may read: the addresses of its alerts, the variables of `environment_from`.

Both are read at submission, kept outside of the run folder in files of mode 0600, and removed after the run.
"""

import os
import shutil
import stat
import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from slurmddp.errors import UserError
from slurmddp.job.plan.model import AlertsPlan, AlertTarget
from slurmddp.records.address import LONGEST, is_address, may_be_sent_to
from slurmddp.records.alert import Alert
from slurmddp.run.evidence import evidence
from slurmddp.run.layout import RunFolder
from slurmddp.supervisor import post
from slurmddp.supervisor.compose import compose
from slurmddp.supervisor.spool import BESIDE_ADDRESSES

#: The file in a run's secrets that says where its folder is; a name with a dot is none of an address.
_OWNER = ".run"
#: The file with the variables of `environment_from`, which node.sh reads: NAME=VALUE, a NUL byte behind each.
_VARIABLES = ".environment"
#: The first part of the names of the files with last alerts, beside the addresses; job.sh looks for it.
_LAST = ".last."
#: Where job.sh puts the time in them.
_NOW = "@now@"
#: How long the secrets of a run that has ended stay: an operator may requeue it, and then it waits in the queue.
_KEPT_SECONDS = 30 * 86400


def config_folder(environment: Mapping[str, str]) -> Path:
    """Return `${XDG_CONFIG_HOME:-~/.config}/slurmddp`; the job looks there, too."""
    base = environment.get("XDG_CONFIG_HOME") or os.path.join(environment.get("HOME") or str(Path.home()), ".config")
    return Path(base) / "slurmddp"


def of_run(run_id: str, environment: Mapping[str, str]) -> Path:
    """Return the folder of a run's addresses, a file for each target."""
    return config_folder(environment) / "secrets" / run_id


def default_file(target: AlertTarget, environment: Mapping[str, str]) -> Path:
    """Return where a target's address is read from if it names no variable and no file."""
    return config_folder(environment) / "alerts" / target.name


def take(
    targets: tuple[AlertTarget, ...], environment: MutableMapping[str, str], project: str | None = None
) -> dict[str, str]:
    """Address by target's name; the variables that held one are removed from `environment`, so that no job and no
    process that is started from here inherits them.

    project: a folder that is copied into the run folder; no file with an address may lie in it. Raises UserError.
    """
    addresses: dict[str, str] = {}
    for target in targets:
        if target.url_env:
            text, where = environment.get(target.url_env, ""), f"${target.url_env}"
            if not text.strip():
                todo = f"export {target.url_env}=ADDRESS, or set url_file"
                raise UserError(f"the address of alert target {target.name} is not set", where=where, todo=todo)
        else:
            path = Path(target.url_file) if target.url_file else default_file(target, environment)
            text, where = _read(path, target, project), str(path)
        addresses[target.name] = _checked(text, target, where)
    for target in targets:
        if target.url_env:
            environment.pop(target.url_env, None)
    return addresses


def take_variables(names: Sequence[str], environment: MutableMapping[str, str]) -> dict[str, str]:
    """Value by name of the variables of `environment_from`, which are removed from `environment` as addresses are.

    Raises one UserError for all that are not set; nothing is removed then.
    """
    missing = [name for name in names if not environment.get(name)]
    if missing:
        todo = f"export {missing[0]}=... and submit again, or remove it from environment_from"
        raise UserError(f"not set in this shell: {', '.join(missing)}", where="environment_from", todo=todo)
    return {name: environment.pop(name) for name in names}


def keep(
    folder: RunFolder,
    addresses: Mapping[str, str],
    environment: Mapping[str, str],
    variables: Mapping[str, str] | None = None,
    last: Mapping[str, str] | None = None,
) -> None:
    """Write a run's secrets where its job finds them: files of mode 0600. last: of `last_alerts`. Raises UserError."""
    texts = {name: f"{text}\n" for name, text in addresses.items()}
    texts.update((_LAST + name, text) for name, text in (last or {}).items())
    texts[_OWNER] = f"{folder.path}\n"
    if variables:
        texts[_VARIABLES] = "".join(f"{name}={value}\0" for name, value in variables.items())
    secrets = of_run(folder.id, environment)
    try:
        config_folder(environment).mkdir(parents=True, exist_ok=True)
        secrets.parent.mkdir(mode=0o700, exist_ok=True)
        secrets.parent.chmod(0o700)
        secrets.mkdir(mode=0o700, exist_ok=True)
        for name, text in texts.items():
            descriptor = os.open(secrets / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
                os.fchmod(descriptor, 0o600)
                file.write(text)
    except OSError as error:
        forget(folder.id, environment)
        todo = "free some space in your home folder, or remove `alerts` and `environment_from`"
        raise UserError(
            f"cannot store the run's secrets: {error.strerror}", where=str(error.filename or secrets), todo=todo
        ) from error


def address(run_id: str, name: str, environment: Mapping[str, str]) -> str | None:
    """Return a target's address of a run; None if it is not known here, or is none that we would send to."""
    try:
        lines = (of_run(run_id, environment) / name).read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    text = lines[0] if lines else ""
    return text if is_address(text) else None


def waiting(folder: RunFolder, environment: Mapping[str, str]) -> list[Path]:
    """Return the alerts of a run that wait to be sent: those that a node has kept beside the addresses, too."""
    spools = (folder.alert_spool, of_run(folder.id, environment) / BESIDE_ADDRESSES / "spool")
    return [entry for spool in spools if spool.is_dir() for entry in spool.iterdir()]


def forget(run_id: str, environment: Mapping[str, str]) -> None:
    """Remove a run's addresses; nothing happens where there are none."""
    shutil.rmtree(of_run(run_id, environment), ignore_errors=True)


def forget_old(environment: Mapping[str, str], now: float | None = None) -> list[str]:
    """Remove the addresses of runs that need them no more, and return those runs' ids.

    That is: nothing waits to be sent, and the run folder is gone while the folder above it is there (a file system that
    is away is no reason), or the job ended a month ago, for good. Never raises.
    """
    removed = []
    now = time.time() if now is None else now
    try:
        folders = sorted((config_folder(environment) / "secrets").iterdir())
    except OSError:
        return []
    for secrets in folders:
        try:
            path = Path((secrets / _OWNER).read_text(encoding="utf-8", errors="surrogateescape").rstrip("\n"))
            if _is_needless(RunFolder(path), environment, now):
                forget(secrets.name, environment)
                removed.append(secrets.name)
        except (OSError, UserError, ValueError):
            continue  # nobody knows: it stays
    return removed


def _is_needless(folder: RunFolder, environment: Mapping[str, str], now: float) -> bool:
    if waiting(folder, environment):
        return False
    if not folder.path.exists():
        return folder.path.parent.is_dir()
    return folder.events.exists() and now - folder.events.stat().st_mtime >= _KEPT_SECONDS and _is_over(folder)


def _is_over(folder: RunFolder) -> bool:
    """Return whether the newest job of the run has exited without a requeue (which it announces before)."""
    facts = evidence(folder)
    return facts.started is not None and facts.ended is not None and facts.requeued is None


def _read(path: Path, target: AlertTarget, project: str | None) -> str:
    """The first line of a file that only its owner can read. Raises UserError."""
    todo = f"install -D -m 600 /dev/stdin {path}   (paste the address, Enter, Ctrl-D)"
    try:
        status = path.stat()
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise UserError(
                f"other users can read the address of alert target {target.name} (mode "
                f"{stat.S_IMODE(status.st_mode):04o})",
                where=str(path),
                todo=f"chmod 600 {path}",
            )
        if project is not None and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(project)):
            raise UserError(
                f"the address of alert target {target.name} is in the project, which is copied to the run folder",
                where=str(path),
                todo=f"move it to ~/.config/slurmddp/alerts/{target.name} and remove url_file",
            )
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        message = f"the file with the address of alert target {target.name} does not exist"
        raise UserError(message, where=str(path), todo=todo) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path), todo=todo) from None
    except UnicodeDecodeError:
        raise UserError("is not text: its first line must be an address", where=str(path)) from None
    return next((line for line in lines if line.strip() and not line.startswith("#")), "")


def _checked(text: str, target: AlertTarget, where: str) -> str:
    """The address, if it is one that a message may go to. Raises UserError that does not show it."""
    text = text.strip()
    if not is_address(text):
        message = f"the address of alert target {target.name} is not of the form https://HOST/PATH"
        raise UserError(message, where=where, todo=f"copy it again: one line, plain characters, at most {LONGEST}")
    if not may_be_sent_to(text, insecure=target.insecure):
        raise UserError(
            f"the address of alert target {target.name} is http://, so others on the network could read the messages",
            where=where,
            todo="use the https address; or, in a network that you trust, set `insecure: true` for this target",
        )
    return text


def last_alerts(alerts: AlertsPlan, payloads: Mapping[str, str], run_id: str, folder: str) -> dict[str, str]:
    """Return the last alert of a job that cannot start its supervisor: curl's configuration without the address, for
    each target that hears of failures from the nodes. job.sh sends it.

    payloads: by the target's name.
    """
    configs = {}
    cause = f"job.sh could not start the supervisor on its node: see {folder}/logs/job.log"
    alert = Alert("failed", "failed", cause, "not restarted automatically", run=run_id, folder=folder)
    for target in alerts.targets:
        composed = compose(target.name, payloads[target.name], alert._replace(time=_NOW))  # type: ignore[arg-type]
        if composed is not None and composed.leave != "login":
            proto = ("proto", "=http,https" if target.insecure else "=https")
            configs[target.name] = post.config(proto, *post.request(composed.message, composed.proxy)).decode()
    return configs
