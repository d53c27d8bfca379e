"""Converts one stage of a Dockerfile, instruction by instruction, into the sections of a definition file."""

import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from slurmddp.errors import collecting
from slurmddp.images.base import Base
from slurmddp.images.context.sources import STAGING, Staged, from_context
from slurmddp.images.context.staging import Item
from slurmddp.images.context.tree import MAGIC, Context
from slurmddp.images.dockerfile.copying import FILES, Copy, from_stage, owner_of, place, read_copy
from slurmddp.images.dockerfile.effects import FLAGS, INSTEAD, NOTED, TRAPS
from slurmddp.images.dockerfile.lines import Instruction, Problems
from slurmddp.images.dockerfile.mounts import SHARED, Mount, around, read_mount
from slurmddp.images.dockerfile.running import SHELL, Running, run_lines
from slurmddp.images.dockerfile.scope import PROXIES, Scope, exports
from slurmddp.images.dockerfile.stages import WORK
from slurmddp.images.dockerfile.words import Parts, Reference, expand, known, pairs, plain, shell, shell_parts
from slurmddp.images.registry.image import RegistryImage

# What these images' own configuration says (their published Dockerfiles and `docker inspect`), for a conversion that
# asks no registry; of others it is unknown then
_WORKDIRS = {"nvcr.io/nvidia/pytorch": "/workspace", "pytorch/pytorch": "/workspace"}
_ENTRYPOINTS = {"nvcr.io/nvidia/pytorch": ("/opt/nvidia/nvidia_entrypoint.sh",)}
#: Where the files of a stage FROM scratch lie in the base that it borrows for its shell.
SCRATCH = "/.scratch"
_NO_FILES = re.compile(r"/(dev|proc|sys)(/|$)")
_ROOT = re.compile(r"(root|0)(:(root|0))?")
_APPTAINERS = ("HOME", "PWD")


@dataclass
class Sections:
    """One stage of the definition file, for the template: each line as it stands there."""

    base: Base
    name: str = ""  # the stage's name in the definition file
    files_from: dict[str, list[str]] = field(default_factory=dict)  # lines of %files by the stage that they come from
    secrets: list[str] = field(default_factory=list)  # ids of those that %files brings
    mounts: int = 0  # how many RUN has
    #: for each instruction, a command that does nothing and names its line, or "", and its lines of %post
    post: list[tuple[str, list[str]]] = field(default_factory=list)
    users: bool = False  # whether a RUN is another user's than root's
    puts: bool = False  # whether %post copies files or makes folders of a user
    start: str = ""  # the stage whose files this one starts from, instead of the base's
    starts: bool = False  # whether it is such a stage
    kept: dict[str, None] = field(default_factory=dict)  # what later stages take of its /tmp and /var/tmp
    environment: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)


@dataclass
class Setting:
    """What all stages of one conversion share."""

    context: Context
    given: Mapping[str, str]
    declared: Mapping[str, str | None]
    #: what registries say of bases, by their names; without it WORKDIR and ENTRYPOINT of most are unknown
    bases: Mapping[str, RegistryImage]
    problems: Problems  # what cannot be converted
    secrets: Collection[str] = ()  # ids of those that the build has
    used_secrets: set[str] = field(default_factory=set)  # those that a RUN takes
    used: set[str] = field(default_factory=set)  # the build's arguments that something takes
    notes: list[str] = field(default_factory=list)  # for the user
    #: by base, what of its configuration is assumed since no registry was asked
    assumed: dict[str, dict[str, None]] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)  # what is gathered from this machine
    staged: int = 0  # how many numbers sources of COPY have taken


class Interpreter:
    """Walks over a stage; `sections`, `running` and `workdir` are the result.

    stage_of: return the stage or image that COPY --from names, and the folder in it.
    root:     the folder that stands for an empty image's root; its stage starts from some base, for its shell.
    start:    the stage whose files it starts from; None for its base's.
    """

    def __init__(
        self,
        base: Base,
        setting: Setting,
        stage_of: Callable[[str, Instruction], tuple[Sections, str]],
        root: str = "",
        start: Sections | None = None,
    ) -> None:
        repository = base.source.split("@")[0].rpartition(":")[0] or base.source
        self._setting = setting
        self._stage_of = stage_of
        self._caches: dict[str, int] = {}
        self._base = repository
        self._root = root
        self._said = image = None if root else setting.bases.get(base.source)
        env = {} if root else image.env if image else None
        self._scope = Scope(setting.given, setting.declared, setting.used, env)
        self._shell: tuple[str, ...] | None = image.shell if image else None
        cwd = f"/{(image.workdir or '').strip('/')}" if image else "/" if root else _WORKDIRS.get(repository)
        self._cwd: Parts | None = (cwd,) if cwd else None
        self.sections = Sections(base)
        if start:
            start.starts, self.sections.start = True, start.name
            self.sections.files_from[start.name] = ["/ /"]
        self.running = Running()
        self.workdir: Parts | None = None  # as far as the Dockerfile sets it, until `finish`
        self._user: Parts = ()  # whose a RUN is; empty for root
        self._owners: set[Parts] = set()  # of whom it is noted that the base's files are not theirs
        proxies = [(name, setting.given[name]) for name in PROXIES if name in setting.given]
        setting.used.update(name for name, _ in proxies)
        if self._cwd and self._cwd != ("/",):
            self.sections.post.append(("", [f"mkdir -p {shell_parts(self._cwd)}", f"cd {shell_parts(self._cwd)}"]))
        if image and image.user and not _ROOT.fullmatch(image.user):
            self._user = (image.user,)
            note = f"the base {repository} sets USER {image.user}, which applies to RUN as in Docker"
            setting.notes.append(f"{note}: Apptainer runs the image as the user who starts it")
        for trigger in image.triggers if image else ():
            note = f"the base {repository} has ONBUILD {trigger}"
            setting.notes.append(f"{note}: add it to the Dockerfile if you need it")
        # Apptainer's own of these would be others
        proxies += [(name, image.env[name]) for name in ("HOME", "PATH") if image and name in image.env]
        if proxies:
            self.sections.post.append(("", [f"export {name}={shell(value)}" for name, value in proxies]))

    def stage(self, body: tuple[Instruction, ...], done: bool = False) -> None:
        """Take over the instructions of one stage. done: its files are there, and the rest is to be known."""
        self._done = done
        if self.running.own:
            self.running = Running(self.running.entrypoint, self.running.command)
        for instruction in body:
            refused = [name for name, _ in instruction.flags if name not in FLAGS.get(instruction.keyword, ())]
            for name in refused:
                todo = INSTEAD.get(name, "remove the option")
                error = instruction.error(f"{instruction.keyword} --{name} is not converted", todo)
                self._setting.problems.found.append(error)
            handler = getattr(self, f"on_{instruction.keyword.lower()}", None)
            if done and instruction.keyword in WORK:
                continue
            options = (f"--{name}={value}" for name, value in instruction.flags)
            whole = " ".join((instruction.keyword, *options, instruction.text))
            for note in (note for pattern, note in TRAPS.items() if re.match(pattern, whole)):
                self._note(instruction, note)
            if handler and not refused:
                with collecting(self._setting.problems.found):
                    handler(instruction)
            elif not refused:
                self._note(instruction, f"{instruction.keyword}: {NOTED[instruction.keyword]}")
        if done and self._cwd:
            self.sections.post.append(("", [f"cd {shell_parts(self._cwd)}"]))

    def finish(self) -> Running:
        """Return what the image runs, with the base's own ENTRYPOINT where it is known."""
        running = self.running
        if self.workdir and not running.said:
            note = f"WORKDIR {plain(self.workdir) or '...'} has no effect when the image runs"
            note = f"{note}, because it has no CMD or ENTRYPOINT: Apptainer starts in the current folder"
            self._setting.notes.append(note)
        if running.said and not self.workdir:
            if self._cwd:
                note = f"the image starts in {plain(self._cwd)}, its base's WORKDIR, as in Docker"
                self._setting.notes.append(f"{note}: relative paths in its arguments begin there")
            else:
                self._assume("its WORKDIR is /, in which the image starts")
            self.workdir = self._cwd or ("/",)
        if running.entrypoint is None and running.command is not None:
            entrypoint = self._said.entrypoint if self._said else _ENTRYPOINTS.get(self._base)
            if entrypoint:
                return Running(entrypoint, running.command)
            if not self._said:
                self._assume("there is no ENTRYPOINT before CMD")
        return running

    def _assume(self, fact: str) -> None:
        self._setting.assumed.setdefault(self._base, {})[fact] = None

    def _note(self, instruction: Instruction, text: str) -> None:
        self._setting.notes.append(f"{instruction.where}: {text}")

    def _post(self, instruction: Instruction, lines: Iterable[str]) -> None:
        self.sections.post.append((f": line {instruction.line}: {instruction.keyword}", list(lines)))

    def on_run(self, instruction: Instruction) -> None:
        if self._root:
            message = "RUN needs a shell, and a stage FROM scratch has none"
            raise instruction.error(message, "start it from a small base")
        self._quoted_wrongly(instruction)
        user = f"as {instruction.line} {shell_parts(self._user)} {self._scope.home()}" if self._user else ""
        self.sections.users = self.sections.users or bool(user)
        if self._user and self._user not in self._owners:
            self._owners.add(self._user)
            note = f"RUN as {plain(self._user) or '$USER'}: a build without root gives all files of the base to root"
            self._note(instruction, f"{note}; to change some here, RUN chown them as root before")
        before, after = self._mounts(instruction)
        self._post(instruction, [*before, *run_lines(instruction, self._prefix(instruction), user), *after])

    def _mounts(self, instruction: Instruction) -> tuple[list[str], list[str]]:
        """The commands of %post before and after a RUN with --mount."""
        before: list[str] = []
        after: list[str] = []
        for value in (value for name, value in instruction.flags if name == "mount"):
            mount = read_mount(value, instruction, self._scope.lookup, self._cwd or ("/",), self._setting.secrets)
            self._folder(mount.said.get("target", "/"), instruction)
            if SHARED.fullmatch(mount.target):
                self._note(instruction, f"type={mount.kind} is ignored: {mount.target} is the host's in a build")
                continue
            if mount.kind == "secret" and mount.name not in self._setting.secrets:
                note = f"the build has no secret {mount.name}, so RUN runs without it, as in Docker"
                self._note(instruction, f"{note}; --secret id={mount.name},src=FILE gives it")
                continue
            if mount.kind == "cache":
                self._note(instruction, "type=cache is empty when a build starts, and is not part of the image")
            self.sections.mounts += 1
            first, last = around(mount, self.sections.mounts, self._source(mount, instruction))
            before, after = [*before, *first], [*last, *after]
        turn = ['cd "$PWD"'] if before else []  # the folder may be another one by now
        return [*before, *turn], [*after, *turn]

    def _source(self, mount: Mount, instruction: Instruction) -> str:
        """Return where what a mount brings lies."""
        if mount.kind == "secret":
            self._setting.used_secrets.add(mount.name)
            self.sections.secrets.append(mount.name)
            return f"{STAGING}/secrets/{mount.name}"
        if mount.kind != "bind":
            number = self._caches.setdefault(mount.name, len(self._caches)) if mount.kind == "cache" else "tmpfs"
            return f"{STAGING}/cache/{number}"
        source = mount.said.get("source", "/")
        if MAGIC.search(source):
            message = f"{source!r} is neither a file nor a folder, so it cannot be mounted"
            raise instruction.error(message, "name one, without a pattern")
        return self._stage(Copy(instruction, (source,), (mount.target,), mount.said.get("from"))).places[0]

    def on_env(self, instruction: Instruction) -> None:
        values = self._scope.env(instruction)
        for name, parts in values:
            if name in _APPTAINERS:
                self._note(instruction, f"Apptainer sets {name} itself when the image runs; the build sees this value")
            self._note_reference(instruction, name, parts)
        self._post(instruction, exports(values))
        self.sections.environment += exports([pair for pair in values if pair[0] not in _APPTAINERS])

    def on_arg(self, instruction: Instruction) -> None:
        values = self._scope.arg(instruction, self._setting.notes)
        for name, parts in values:
            self._note_reference(instruction, name, parts)
        # An ENV after it may use it
        self.sections.environment += exports([pair for pair in values if plain(pair[1]) is None])
        if values:
            self._post(instruction, exports(values))

    def _note_reference(self, instruction: Instruction, name: str, parts: Parts) -> None:
        if any(isinstance(part, Reference) and part.name != "PATH" for part in parts):
            note = f"{name} refers to a variable of the base image"
            self._note(instruction, f"{note}: if the base has none, the image gets the host's value when it runs")

    def on_shell(self, instruction: Instruction) -> None:
        words = replace(instruction, text=re.sub(r"\]\s*#.*", "]", instruction.text)).array()
        if not words:
            raise instruction.error("SHELL has no program", 'SHELL ["/bin/bash", "-c"]')
        self._shell = tuple(words)

    def _prefix(self, instruction: Instruction) -> tuple[str, ...]:
        """Return what a command in shell form is handed to."""
        if not (self._shell or self._said or instruction.array() or self._base in _WORKDIRS):
            self._assume("its SHELL is /bin/sh")
        return self._shell or SHELL

    def on_workdir(self, instruction: Instruction) -> None:
        path = place(self._expanded(instruction.text, instruction), self._folder(instruction.text, instruction))
        text = plain(path)
        self._cwd = self.workdir = path if text is None else (text.rstrip("/") or "/",)
        if self._done:
            return
        word = shell_parts((self._root, *self._cwd))
        made = f"mkdir -p {word}"
        if self._user:
            self.sections.puts = True
            made = f"(owner={shell_parts(owner_of(self._user, instruction))} && folder {word})"
        self._post(instruction, [made, f"cd {word}"])

    def _expanded(self, text: str, instruction: Instruction) -> Parts:
        """Expand what Docker knows at build time, like `expand`; variables of the shell are assumed to be set."""
        return self._assume_set(expand(text, self._scope.lookup, instruction))

    def _assume_set(self, parts: Parts) -> Parts:
        for part in parts:
            if isinstance(part, Reference):
                self._assume(f"it sets {part.name}")
        return parts

    def _folder(self, path: str, instruction: Instruction) -> Parts:
        """The folder that a relative path begins at."""
        if self._cwd is None and not path.startswith(("/", "$", '"', "'")):
            note = f"{path!r} begins at / here; a WORKDIR of the base image {self._base} is unknown"
            self._note(instruction, note)
        return self._cwd or ("/",)

    def on_copy(self, instruction: Instruction) -> None:
        written = (instruction.array() or instruction.text.split())[-1]
        copy = read_copy(instruction, self._scope.lookup, self._folder(written, instruction))
        self._assume_set((*copy.destination, *copy.owner))
        if copy.addresses and not copy.mode:
            note = "the file has mode 600 and is root's, as in Docker: users who run the image cannot read it"
            self._note(instruction, f"{note}, unless you add --chmod=644")
        if _NO_FILES.match(plain(copy.destination) or "") and not self._root:
            self._note(instruction, "files for /dev, /proc and /sys are ignored: an image has no such files")
            return
        self.sections.puts = True
        copy = replace(copy, destination=(self._root, *copy.destination))
        self._post(instruction, copy.commands(self._stage(copy)))

    def _stage(self, copy: Copy) -> Staged:
        """Have %files bring the sources."""
        number = self._setting.staged + 1
        if copy.stage:
            source, root = self._stage_of(copy.stage, copy.instruction)
            inside = (root + posixpath.normpath(f"/{origin}").replace("//", "/") for origin in copy.origins)
            name, staged = source.name, from_stage(replace(copy, origins=tuple(inside)), number, bool(source.post))
            source.kept.update(dict.fromkeys(staged.kept))
        else:
            name, staged = FILES, from_context(copy, number, self._setting.context)
        self._setting.staged += len(staged.files)
        self._setting.items.extend(staged.items)
        if staged.files:
            self.sections.files_from.setdefault(name, []).extend(" ".join(pair) for pair in staged.files)
        return staged

    on_add = on_copy

    def on_user(self, instruction: Instruction) -> None:
        user = self._expanded(instruction.text, instruction)
        name = plain(user)
        self._user = () if _ROOT.fullmatch(name or "") else user
        if self._user:
            note = f"USER {name or instruction.text} applies only to the RUN lines that follow"
            self._note(instruction, f"{note}: Apptainer runs the image as the user who starts it")

    def on_cmd(self, instruction: Instruction) -> None:
        self.running = replace(self.running, command=self._argv(instruction), own=True)

    def on_entrypoint(self, instruction: Instruction) -> None:
        """Set it, which takes away a CMD that the base brought."""
        command = self.running.command if self.running.own else ()
        self.running = replace(self.running, entrypoint=self._argv(instruction), command=command)

    def _argv(self, instruction: Instruction) -> tuple[str, ...]:
        self._quoted_wrongly(instruction)
        array, prefix = instruction.array(), self._prefix(instruction)
        return (*prefix, instruction.text) if array is None else tuple(array)

    def _quoted_wrongly(self, instruction: Instruction) -> None:
        if re.match(r"\[\s*['\"]", instruction.text) and instruction.array() is None:
            note = "this is not a JSON array, so /bin/sh runs it as one line, as in Docker"
            self._note(instruction, f"{note}: use double quotes")

    def on_label(self, instruction: Instruction) -> None:
        for name, raw in pairs(instruction):
            parts = self._expanded(raw, instruction)
            values = [known(name, self._scope.lookup, instruction), plain(parts) or ""]
            if plain(parts) is None:
                self._note(instruction, f"the label {name} is omitted: only the base image knows its value")
                continue
            for text in values:
                if "{{" in text or not text.isprintable():
                    todo = "remove that from the label"
                    raise instruction.error(f"the label {text!r} contains '{{{{' or a control character", todo)
            if not re.fullmatch(r"[^\s#%][^\s]*", values[0]) or values[0].lower().startswith("bootstrap:"):
                raise instruction.error(f"{values[0]!r} is not a label name", "use letters, digits, dots and -")
            self.sections.labels.append(" ".join(values).strip())

    def on_maintainer(self, instruction: Instruction) -> None:
        if "{{" in instruction.text:
            raise instruction.error("the label maintainer contains '{{'", "remove that")
        self.sections.labels.append(f"maintainer {instruction.text}")
