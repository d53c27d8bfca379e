"""Alerts: targets and the kinds that they receive, the host that sends, and the watchdog job."""

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from slurmddp.job.types import EnvName, Line, Model, Name, PathStr, SbatchFlag, SbatchValue, TimeLimit

Kind = Literal["started", "requeued", "recovered", "hang", "straggler", "warning", "stopping", "failed", "finished"]

#: What a run tells of, in the order in which it may happen.
KINDS: tuple[Kind, ...] = get_args(Kind)

#: What a target hears of where it does not say: all but that a job began as it was meant to.
DEFAULT_KINDS: tuple[Kind, ...] = KINDS[1:]

_ADDRESS_GOES = "write it to ~/.config/slurmddp/alerts/NAME (mode 0600), or set url_env to a variable that contains it"


def _mail_address(text: str) -> str:
    if "=" in text or not all(part and "," not in part for part in text.split(",")):
        raise ValueError("must be a mail address or a user name; separate several with commas")
    return text


def _proxy(text: str) -> str:
    scheme, separator, host = text.partition("://")
    if not separator or scheme not in ("http", "https", "socks5h") or not host:
        raise ValueError("must be the proxy's address, such as http://proxy.site:3128")
    if "@" in host:
        raise ValueError("contains a user name or password, which every run folder would then contain")
    return text


class Target(Model):
    """One receiver of alerts, and the kinds that it receives.

    The address is a secret and is in no file of the run: `submit` reads it from the variable `url_env`, the file
    `url_file`, or by default ~/.config/slurmddp/alerts/NAME. Only you may be able to read these files.
    insecure: the address may be http:// (always allowed for this host). address: mail only, sbatch's --mail-user.
    """

    to: Literal["slack", "discord", "teams", "ntfy", "json", "mail"]
    name: Name | None = None
    url_env: EnvName | None = None
    url_file: PathStr | None = None
    address: Annotated[SbatchValue, AfterValidator(_mail_address)] | None = None
    on: tuple[Kind, ...] = DEFAULT_KINDS
    insecure: bool = False

    @property
    def called(self) -> str:
        """Its name, by default that of its kind."""
        return self.name or self.to

    @model_validator(mode="before")
    @classmethod
    def _no_secret(cls, value: Any) -> Any:
        # Before all else, since other messages show the value that is wrong.
        if isinstance(value, dict) and any("://" in text for text in value.values() if isinstance(text, str)):
            raise ValueError("contains the address itself, a secret that must not be in a job file: " + _ADDRESS_GOES)
        return value

    @model_validator(mode="after")
    def _address_from_one_place(self) -> "Target":
        if self.url_env and self.url_file:
            raise ValueError("has both url_env and url_file: remove one")
        if self.to == "mail" and (self.url_env or self.url_file or self.insecure):
            raise ValueError("is mail, which Slurm sends: remove url_env, url_file and insecure")
        if self.to != "mail" and self.address:
            raise ValueError("has an address, which only mail may have: it is a secret, so use url_env or url_file")
        return self


class Outlet(Model):
    """Which host sends alerts: a node, a node through a proxy, or the login node.

    Default: the login node if the profile says that nodes have no internet, else a node.
    """

    from_: Annotated[Literal["node", "proxy", "login"] | None, Field(alias="from")] = None
    proxy: Annotated[Line, AfterValidator(_proxy)] | None = None

    @model_validator(mode="after")
    def _proxy_is_known(self) -> "Outlet":
        if (self.from_ == "proxy") != (self.proxy is not None):
            raise ValueError("must have proxy if `from` is proxy, and must not have it otherwise")
        return self


class Watchdog(Model):
    """A small job after each run that checks how the run ended. Keys that are not set have Slurm's default.

    sbatch: further options, such as --qos=NAME, or those that the partition requires.
    """

    partition: SbatchValue | None = None
    time: TimeLimit = 300
    account: SbatchValue | None = None
    sbatch: tuple[SbatchFlag, ...] = ()
