"""The field types that the models share. Each refuses what could not arrive in the job unchanged."""

import math
import re
import typing
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from slurmddp.job.document import RUN, Plain, typed


class Model(BaseModel):
    """Base of all models: unknown keys are errors, instances do not change."""

    # Field names are the field's own words ("global", "schema"), hence aliases beside Python names.
    # A validator is built at its first use: a command uses those of Job and Site, which hold all others. This is also
    # why a default that is a model is made by `model_construct`, which needs none.
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False, defer_build=True)


class Adds:
    """Marks a list to which a later layer adds; a list without it is replaced by a later layer."""


class PathText:
    """Marks a text in which $NAME and ${NAME} are expanded, once, at submission.

    relative: whether a path that is not absolute starts at the folder of submission.
    """

    def __init__(self, *, relative: bool = True) -> None:
        self.relative = relative


class Unit:
    """Marks a number that is written with its unit."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix


#: The values of train.workdir that are no path.
WORKDIRS = ("submit", "run")
#: Patterns are texts, which `re` compiles and keeps at their first use: most commands need few of them.
_NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}"
SBATCH = r"[A-Za-z0-9_.,:;=@/+*|&!()\[\]%~^-]+"
_INTERFACE = r"[\^=]{0,2}[A-Za-z0-9_.,:@-]+"
_ENV_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_NUMBER = r"(\d{1,9}(?:\.\d{1,9})?)"
_CLOCK = r"(?:(\d{1,9})-)?(\d{1,9}):(\d{1,2}):(\d{1,2})"
#: At least one of days, hours, minutes, seconds, in this order: 1d12h, 1h30m, 90 s.
_UNITS = r"(?=\d)" + " ?".join(
    f"(?:{_NUMBER} ?{unit})?" for unit in ("d(?:ays?)?", "h(?:ours?)?", "m(?:in)?", "s(?:ec)?")
)
_MEMORY = r"(\d{1,12})\s*([KMGT])(?:i?B)?"
_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}


def is_name(text: str) -> bool:
    """Return whether a text can be the name of a profile, a partition or a job."""
    return re.fullmatch(_NAME, text) is not None


def _name(text: str) -> str:
    if not is_name(text):
        raise ValueError("must be 1 to 100 letters, digits, '.', '_', '+' or '-', and begin with a letter or digit")
    return text


def _any_text(text: str) -> str:
    """Whatever a process can be given: no NUL, and text that UTF-8 can write."""
    if "\0" in text:
        raise ValueError("contains a NUL character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("contains a character that UTF-8 cannot encode") from None
    return text


def _line(text: str) -> str:
    _any_text(text)
    if not text.strip():
        raise ValueError("is empty")
    if any(ord(char) < 32 or ord(char) == 127 or char in "\u0085\u2028\u2029" for char in text):
        raise ValueError("contains a line break or control character")
    return text


def _sbatch_value(text: str) -> str:
    if text.startswith("-"):
        raise ValueError("begins with a dash, which sbatch would read as an option")
    if not re.fullmatch(SBATCH, text):
        raise ValueError("contains a character that an #SBATCH line does not accept (space, quote, $, backslash, ...)")
    return text


def _no_boolean(value: Any) -> Any:
    """YAML 1.1 reads `no` as false, and ours keeps the text: which of them is meant, only its author knows."""
    if type(value) is Plain and value.lower() in ("yes", "no", "on", "off", "true", "false"):
        raise ValueError(f'is a Boolean in YAML: if it is a name, write "{value}" in quotes, else remove the key')
    return value


def _sbatch_flag(text: str) -> str:
    if not re.fullmatch(r"--?[A-Za-z][A-Za-z0-9-]*(=.+)?", text, re.DOTALL):
        raise ValueError("must be one sbatch option such as --reservation=NAME")
    if not re.fullmatch(SBATCH, text):
        raise ValueError("contains a character that an #SBATCH line does not accept (space, quote, $, backslash, ...)")
    return text


def path_text(text: str) -> str:
    _line(text)
    if text.startswith("-"):
        raise ValueError("begins with a dash; write ./-name for a file of that name")
    return text


def _workdir(text: str) -> str:
    path_text(text)
    if re.match("~[^/]", text):
        raise ValueError(f"begins with {text.partition('/')[0]}: write an absolute path")
    if text.rfind(RUN) > 0 or (text.startswith(RUN) and text[len(RUN) :][:1] not in ("", "/")):
        raise ValueError(f"may have {RUN} only as its first folder, because it is an absolute path: {RUN}/out")
    return text


def _interface(text: str) -> str:
    if not re.fullmatch(_INTERFACE, text):
        raise ValueError("must be an interface in the syntax of NCCL_SOCKET_IFNAME: ib0, ib, =ib0, or ^lo,docker")
    return text


def _env_name(text: str) -> str:
    if not re.fullmatch(_ENV_NAME, text):
        raise ValueError("must be letters, digits and '_', not beginning with a digit")
    return text


def seconds_of(text: str) -> int:
    """Seconds of a duration as users write it: 90s, 30m, 1h30m, 1.5h, 2d, 24:00:00, 1-12:00:00, or seconds: 90.

    Raises ValueError.
    """
    text = text.strip()
    if clock := re.fullmatch(_CLOCK, text):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        if minutes > 59 or seconds > 59:
            raise ValueError("has minutes or seconds above 59")
        return days * 86400 + hours * 3600 + minutes * 60 + seconds
    match = re.fullmatch(_UNITS, text)
    if match:
        parts = (float(part or 0) for part in match.groups())
        return round(sum(part * unit for part, unit in zip(parts, (86400, 3600, 60, 1), strict=True)))
    if re.fullmatch(_NUMBER, text):
        return round(float(text))
    raise ValueError("must be a duration such as 90s, 30m, 1h30m, 24:00:00 or 1-12:00:00")


def _seconds(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return value  # built in Python, in seconds; text never arrives as an int
    return seconds_of(value if isinstance(value, str) else "")


def _time_limit(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(_NUMBER, value.strip()):
        raise ValueError(f"needs a unit: write {value}h for hours, or {value}m for minutes (Slurm's default)")
    if isinstance(value, str) and (short := re.fullmatch(r"(\d{1,9}):(\d{1,2})", value.strip())):
        first, second = short.groups()
        raise ValueError(
            f"is {first} minutes to Slurm: write {first}m for that, or {first}:{second}:00 for {first} hours"
        )
    return _seconds(value)


def mebibytes(value: Any) -> Any:
    """Memory: 480G, 64GB, 500000M -> MiB, as Slurm counts them."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(_MEMORY, str(value).strip().upper().replace("IB", "B")) if isinstance(value, str) else None
    if not match:
        raise ValueError("must be an amount of memory with a unit, such as 480G or 500000M")
    return math.ceil(int(match.group(1)) * _MIB[match.group(2)])


def _node_memory(value: Any) -> Any:
    return 0 if value == "all" else mebibytes(value)


def _count(value: Any) -> Any:
    """Whole numbers may be written 100000, 100_000 or 1e5."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,15}(\.\d{1,15})?[eE]\+?\d{1,2}", value):
        number = float(value)
        if number == int(number):
            return int(number)
    return value


def _runtime_option(text: str) -> str:
    _any_text(text)
    if not text.startswith("-"):
        raise ValueError("must be one option that begins with a dash, with its value after '=': --flag=value")
    return text


Name = Annotated[str, AfterValidator(_name)]
Text = Annotated[str, AfterValidator(_any_text)]
Line = Annotated[str, AfterValidator(_line)]
SbatchValue = Annotated[str, BeforeValidator(_no_boolean), AfterValidator(_sbatch_value)]
SbatchFlag = Annotated[str, AfterValidator(_sbatch_flag)]
RuntimeOption = Annotated[str, AfterValidator(_runtime_option)]
PathStr = Annotated[str, AfterValidator(path_text), PathText()]
Workdir = Annotated[str, AfterValidator(_workdir), PathText(relative=False)]
#: A path that starts at the working directory of the ranks.
OutputPath = Workdir
Interface = Annotated[str, AfterValidator(_interface)]
EnvName = Annotated[str, AfterValidator(_env_name)]
Seconds = Annotated[int, BeforeValidator(_seconds), Field(gt=0), Unit("s")]
#: 0: not at all.
SecondsOrNone = Annotated[int, BeforeValidator(_seconds), Field(ge=0), Unit("s")]
#: Seconds of what Slurm calls --time, where users of Slurm write minutes without a unit: a number alone is refused.
TimeLimit = Annotated[int, BeforeValidator(_time_limit), Field(gt=0), Unit("s")]
Mebibytes = Annotated[int, BeforeValidator(mebibytes), Field(gt=0), Unit("M")]
#: Memory of a node; 0, written `all`, is Slurm's own word for all of it.
NodeMemory = Annotated[int, BeforeValidator(_node_memory), Field(ge=0), Unit("M")]
Count = Annotated[int, BeforeValidator(_count), Field(ge=1, le=10**12)]
Whole = Annotated[int, BeforeValidator(_count), Field(ge=0, le=10**12)]
Free = Annotated[Any, BeforeValidator(typed)]
EnvMap = dict[EnvName, Text]


def find_marks(field: Any) -> Iterator[Any]:
    """The marks (Adds, PathText, Unit, ...) of a model field, inside `X | None` and the like too."""
    yield from field.metadata
    pending = [field.annotation]
    while pending:
        annotation = pending.pop()
        yield from getattr(annotation, "__metadata__", ())
        pending.extend(typing.get_args(annotation))


def unit_of(field: Any) -> str:
    """The suffix with which the field's number is written, or an empty text."""
    return next((mark.suffix for mark in find_marks(field) if isinstance(mark, Unit)), "")


def memory(mebibytes: int) -> str:
    """MiB in the largest unit that divides it: 480G, 500M."""
    return f"{mebibytes // 1024}G" if mebibytes % 1024 == 0 else f"{mebibytes}M"


def slurm_time(seconds: int) -> str:
    """Seconds as Slurm writes them: 1-02:03:04 or 02:03:04."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock
