"""COPY and ADD: what %files carries into /.slurmddp, and the commands that put it where the Dockerfile says.

%files all come before %post, and Apptainer's own rules of where a file ends up are not Docker's. So each source goes
to a numbered folder first, and to its place when its turn comes. Those of the context come from the stage FILES.
"""

import posixpath
import re
from dataclasses import dataclass

from slurmddp.images.context.download import read_address
from slurmddp.images.context.ignore import Ignore, patterns
from slurmddp.images.context.sources import ADDRESS, STAGING, Staged
from slurmddp.images.context.tree import MAGIC
from slurmddp.images.dockerfile.lines import Heredoc, Instruction, split
from slurmddp.images.dockerfile.words import Lookup, Parts, Reference, expand, known, plain, script, shell, shell_parts

_INLINE = f"{STAGING}.heredoc"
#: Where a stage keeps what others take of its /tmp and /var/tmp, which are no part of its files.
KEPT = f"{STAGING}.tmp"
#: The name of the stage that has the files of this machine.
FILES = "slurmddp-files"

_OWNER = re.compile(r"(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)?(:(?P<group>[A-Za-z0-9_][A-Za-z0-9_.-]*))?")
_MODE = re.compile(r"[0-7]{3,4}|[ugoa]*[-+=][rwxXst]*(,[ugoa]*[-+=][rwxXst]*)*")
_TEMPORARY = re.compile(r"/(var/)?tmp(/[^/]+)?(?=/|$)")
# Apptainer hands them to `for n in NAME; do printf "$n"`, with a backslash before each space
_FROM_STAGE = re.compile(r"/[\w@+=:,./*?\[\] -]*")
# Below a folder of a stage, for `rm`: `*` of a shell does not match a name that begins with a dot
_PART = r"(?!\.\.?(?:/|$))[\w@+=:,.-](?:[\w@+=:,.?\[\]-]|\*(?!\*))*"
_EXCLUDED = re.compile(f"/?{_PART}(?:/{_PART})*/?")


@dataclass(frozen=True)
class Copy:
    """One COPY or ADD, read."""

    instruction: Instruction
    origins: tuple[str, ...]
    destination: Parts
    stage: str | None  # what --from names, else None
    owner: Parts = ()  # for chown, or "" where it stays
    mode: str = ""  # for chmod, or ""
    parents: bool = False  # whether folders above a source go in, too
    exclude: Ignore = Ignore()  # noqa: RUF009 -- frozen
    without: str = ""  # what of a stage's folder is left out, as words of the shell
    #: heredocs among the sources: their names, and their texts as words of the shell
    inline: tuple[tuple[str, str], ...] = ()
    addresses: tuple[tuple[str, str], ...] = ()
    checksum: str = ""

    @property
    def into_folder(self) -> bool:
        """Return whether the destination says that it is a folder."""
        return is_folder(self.destination)

    def commands(self, staged: Staged) -> list[str]:
        """The calls of the template's functions that put everything in its place. Raises UserError."""
        calls = []
        owner, to = shell_parts(self.owner), shell_parts(self.destination)
        copy = f"copy {owner} {shell(self.mode)} {to}"
        for path in staged.places:
            if path not in staged.archives:
                pattern = self.stage and MAGIC.search(path)
                calls += [f"bare {path}"] if path.count("/") == 2 else []  # all of a stage
                calls += [f"(cd {shell(path)} && rm -rf {self.without})"] if self.without else []
                calls.append(f"{copy} {path if pattern else shell(path)}")
            elif self.mode:
                raise self.instruction.error("ADD --chmod of an archive is not converted", "RUN chmod after it")
            else:
                calls.append(f"unpack {owner} {to} {shell(path)}")
        for name, text in self.inline:
            file = shell(f"{_INLINE}/{name}")
            calls += [f"mkdir {_INLINE}", f"printf %s {text} > {file}", f"{copy} {file}", f"rm -r {_INLINE}"]
        return calls


def read_copy(instruction: Instruction, lookup: Lookup, workdir: Parts) -> Copy:
    """Read a COPY or an ADD; a relative destination begins at `workdir`. Raises UserError."""
    raw = instruction.array() or split(instruction.text, instruction.escape)
    heredocs = {heredoc.word: heredoc for heredoc in instruction.heredocs}
    if len(raw) < 2 or raw[-1] in heredocs:
        raise instruction.error(f"{instruction.keyword} needs a source and a destination", "COPY SOURCE DESTINATION")
    given = [(name, known(value, lookup, instruction)) for name, value in instruction.flags if name != "chown"]
    flags = dict(given)
    origins = [known(word, lookup, instruction) for word in raw[:-1] if word not in heredocs]
    destination = place(expand(raw[-1], lookup, instruction), workdir)
    if len(raw) > 2 and not is_folder(destination):
        raise instruction.error(f"several sources need a folder, but {raw[-1]!r} is not one", "end it with /")
    addresses = [origin for origin in origins if ADDRESS.match(origin)]
    if flags.get("checksum") and (len(addresses), len(raw)) != (1, 2):
        raise instruction.error("--checksum works for one URL only", "write one ADD per URL")
    names = [read_address(origin, flags.get("checksum", ""), instruction) for origin in addresses]
    mode = flags.get("chmod", "")
    if mode and not _MODE.fullmatch(mode):
        raise instruction.error(f"--chmod={mode} is not a mode", "write --chmod=755")
    parents = flags.get("parents", "false") in ("", "true")
    exclude = [value for name, value in given if name == "exclude"]
    stage = flags.get("from")
    plainly = all(map(_EXCLUDED.fullmatch, exclude)) and not (exclude and any(map(MAGIC.search, origins)))
    if stage and (parents or not plainly):
        text = "--parents, and --exclude with *NAME, !NAME or a source with a pattern, cannot be combined with --from"
        raise instruction.error(text, "remove the option, and name files and folders one by one")
    chown = expand(dict(instruction.flags).get("chown", ""), lookup, instruction)
    owner = owner_of(chown, instruction) if chown else () if stage else ("0:0",)
    inline = [(one.name, _text(one, lookup, instruction)) for word in raw if (one := heredocs.get(word))]
    ignore = Ignore() if stage else Ignore(patterns("\n".join(exclude), instruction.where))
    without = " ".join(name.lstrip("/") for name in exclude) if stage else ""
    return Copy(
        instruction, tuple(origins), destination, stage, owner, mode, parents, ignore, without, tuple(inline),
        tuple(zip(addresses, names, strict=True)), flags.get("checksum", ""),
    )  # fmt: skip


def _text(heredoc: Heredoc, lookup: Lookup, instruction: Instruction) -> str:
    if "/" in heredoc.name:
        raise instruction.error(f"{heredoc.word} is not a file name", "write <<NAME")
    text = heredoc.content
    return script(expand(text, lookup, instruction, quotes=False) if heredoc.expand else (text,))


def owner_of(parts: Parts, instruction: Instruction) -> Parts:
    """USER:GROUP for chown. Docker takes the number of a user for the group's, too, and a name's own group."""
    text = plain(parts)
    if text is None:
        return parts
    match = _OWNER.fullmatch(text)
    if not match:
        raise instruction.error(f"{text} is not USER:GROUP", "write --chown=USER:GROUP")
    user, group = match["user"] or "0", match["group"]
    return (f"{user}:{group or (user if user.isdecimal() else '')}",)


def is_folder(path: Parts) -> bool:
    return bool(path) and isinstance(path[-1], str) and path[-1].endswith("/")


def place(path: Parts, workdir: Parts) -> Parts:
    """The path, absolute; a slash at its end, which makes it a folder, stays.

    What begins with a variable of the base does begin with a slash.
    """
    begins = bool(path) and (isinstance(path[0], Reference) or path[0].startswith("/"))
    parts = path if begins else (*workdir, "/", *path)
    text = plain(parts)
    if text is None:
        return parts
    whole = posixpath.normpath("/" + text).replace("//", "/")
    folder = text.endswith("/") or text.rsplit("/", 1)[-1] in (".", "..")
    return (whole.rstrip("/") + "/" if folder else whole,)


def from_stage(copy: Copy, number: int, built: bool) -> Staged:
    """A COPY --from; its sources are staged as `number` and the next ones. Raises UserError.

    built: whether a %post makes the stage, whose /tmp and /var/tmp are folders of the build then.
    """
    files, places, kept = [], [], []
    for count, origin in enumerate(copy.origins, number):
        source = posixpath.normpath("/" + origin).replace("//", "/")
        if not _FROM_STAGE.fullmatch(source):
            todo = "in that stage, RUN mv it to a name of letters, digits, spaces and . _ - + = @ : , and copy that"
            raise copy.instruction.error(f"{origin!r} of another stage cannot be copied by Apptainer", todo)
        name = "*" if MAGIC.search(source) else posixpath.basename(source)
        if built and (temporary := _TEMPORARY.match(source)):
            place = KEPT + posixpath.dirname(temporary.group()).rstrip("/")
            kept.append("mkdir -p {0} && cp -a {1} {0}/".format(place, temporary.group().replace(" ", "\\ ")))
            source = KEPT + source
        files.append((f'"{source}"' if " " in source else source, f"{STAGING}/{count}/"))
        places.append(f"{STAGING}/{count}/{name}".rstrip("/"))
    return Staged(tuple(files), tuple(places), kept=tuple(kept))
