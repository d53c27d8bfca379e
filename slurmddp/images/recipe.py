"""From a recipe, by its name or its file, and the command line to what goes into an image."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from slurmddp.assets import asset_folder
from slurmddp.errors import UserError
from slurmddp.images.base import Base, check_text, is_carried, parse_base
from slurmddp.job.document import Document, Origin, read_file
from slurmddp.job.expand import Expander
from slurmddp.job.layers import merge
from slurmddp.job.recipe import Recipe
from slurmddp.job.validate import origin_of, validate

# What begins otherwise is an option or a path, and a line that begins with '%' opens a section wherever it
# stands (apptainer, pkg/build/types/parser/deffile.go, scanDefinitionFile).
_REQUIREMENT = re.compile(r"[A-Za-z0-9].*")
_PASSWORD = re.compile(r"(https?://[^/\s]*@|://[^/\s@]*:[^/\s]*@)")


@dataclass(frozen=True)
class Ingredients:
    """All that an image is made from, paths absolute."""

    name: str  # of the recipe; "image" where the command line alone says it all
    base: Base
    title: str | None = None
    apt: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    requirements: Path | None = None  # a requirements file, read when the image is built
    index: str | None = None
    installer: str = "pip"
    files: tuple[tuple[Path, str], ...] = ()  # (source, path in the image)
    environment: tuple[tuple[str, str], ...] = ()
    setup: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    folder: Path | None = None  # of the recipe's file; None for a shipped one, and for the command line alone

    @property
    def sources(self) -> tuple[Path, ...]:
        """Files and folders whose content goes into the image, the base not among them."""
        return (*(source for source, _ in self.files), *([self.requirements] if self.requirements else []))


def recipe_names() -> list[str]:
    return sorted(path.stem for path in asset_folder("containers").glob("*.yaml"))


def recipe_file(name: str, cwd: Path) -> Path:
    """The file of a recipe: a shipped one by its name, or a path. Raises UserError that names the known ones."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        path = Path((cwd / name).absolute())
        if path.exists():
            return path
        names = ", ".join(recipe_names())
        raise UserError(f"{path} does not exist", where="--recipe", todo=f"use {names}, or an existing file")
    path = asset_folder("containers") / f"{name}.yaml"
    if name in recipe_names():
        return path
    import difflib

    near = difflib.get_close_matches(name, recipe_names(), 3, 0.4) or recipe_names()
    todo = f"{', '.join(near)}, or a file of your own: ./{name}.yaml"
    raise UserError(f"unknown recipe {name!r}", where="--recipe", todo=todo)


def read_recipe(
    recipe: str | None,
    options: Mapping[str, object],
    cwd: Path,
    environment: Mapping[str, str],
    *,
    allow_files: bool = False,
) -> Ingredients:
    """The ingredients of a recipe (None: of the options alone), with the command line's options laid over it.

    options: recipe keys, values as in a YAML file; lists add. Relative paths of a recipe begin at its own folder (of a
    shipped one at `cwd`), those of the options at `cwd`. What a recipe copies lies below its folder, links followed,
    unless `allow_files`: whoever wrote a recipe that was downloaded must not get the user's files.
    Raises UserError that lists every mistake with its location.
    """
    documents, folder, name, parent = [], cwd, "image", None
    if recipe is not None:
        path = recipe_file(recipe, cwd)
        shipped = path.parent == asset_folder("containers")
        documents.append(read_file(path, "recipe", f"containers/{path.name}" if shipped else str(path)))
        parent = None if shipped else path.parent
        folder, name = parent or cwd, path.stem
    tree = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items() if value}
    documents.append(Document(tree, {(key,): Origin("command line", f"--{key}") for key in tree}))  # the highest layer
    layered = merge(Recipe, documents)
    spec = Expander(environment).model(validate(Recipe, layered))
    given = {key: str(origin.where) for key in layered.tree if (origin := origin_of(layered, (key,))) is not None}
    if spec.index and _PASSWORD.search(spec.index):
        message = "the index address contains a user name or password, which everyone could read in the image"
        raise UserError(message, where=given["index"], todo="use an index or a mirror that needs no login")
    within = None if allow_files else folder
    lines = (layered.origins.get(("pip", str(index))) for index in range(len(spec.pip)))
    wheres = (line.where if line else "--pip" for line in lines)
    pip = tuple(map(check_requirement, spec.pip, wheres))
    base = parse_base(spec.base, cwd if given["base"].startswith("--") else folder, where=given["base"])
    made = Ingredients(
        name=name, base=base, title=spec.title, apt=spec.apt, pip=pip, index=spec.index, installer=spec.installer,
        environment=tuple(spec.environment.items()), setup=spec.setup, test=spec.test,
        labels=tuple(sorted(spec.labels.items())),
        files=tuple((_source(folder / item.source, within), item.destination) for item in spec.files), folder=parent,
    )  # fmt: skip
    if spec.requirements is None:
        return made
    if given["requirements"].startswith("--"):
        folder, within = cwd, None
    path = _source(folder / spec.requirements, within, given["requirements"])
    return replace(made, requirements=_requirements(path, given["requirements"]))


def _source(path: Path, within: Path | None, where: str = "files") -> Path:
    """A file or folder that %files is to copy, absolute. Raises UserError where it leads out of `within`."""
    path = Path(path.absolute())
    if not path.exists():
        raise UserError(f"the file {path} does not exist", where=where, todo="correct the recipe")
    if not (path.is_file() or path.is_dir()):
        raise UserError(f"{path} is neither a file nor a folder", where=where, todo="remove it")
    if not is_carried(str(path)):
        raise UserError(
            f"the name {str(path)!r} contains a character that Apptainer's %files does not accept",
            where=where,
            todo="rename it; letters, digits, spaces and @ % + = : , . / - _ are allowed",
        )
    if within is not None:
        root = os.path.realpath(within)
        below = (os.path.join(top, name) for top, folders, files in os.walk(path) for name in (*folders, *files))
        # Apptainer follows links when it copies (cp -L)
        for name in (str(path), *filter(os.path.islink, below)):
            real = os.path.realpath(name)
            if os.path.commonpath([root, real]) != root:
                leads = f", which points to {real}," if real != name else ""
                todo = "copy it there; or, if you trust the recipe, use `build-image --allow-files`"
                raise UserError(f"{name}{leads} is outside the recipe's folder {root}", where=where, todo=todo)
    return path


def check_requirement(text: str, where: str = "--pip") -> str:
    """One requirement as pip takes it: `name`, `name==1.2`, `name[extra]>=3`, `name @ https://...`, `git+https://...`.

    Raises UserError for options, paths, and addresses that hold a password: the definition stays in the
    image.
    """
    try:
        check_text(text, "the requirement")
    except UserError as error:
        raise UserError(error.what, where=where, todo="write one requirement, such as 'datasets>=3'") from None
    if not _REQUIREMENT.fullmatch(text):
        todo = "write a name, such as 'datasets>=3'"
        raise UserError(f"{text!r} is an option or a path, not a requirement", where=where, todo=todo)
    if _PASSWORD.search(text):
        fault = "the address of a requirement contains a user name or password, which everyone could read in the image"
        raise UserError(fault, where=where, todo="install the package from an index or a public repository")
    return text


def _requirements(path: Path, where: str) -> Path:
    """A requirements file that means the same inside of the image.

    Raises UserError for lines that name other files, which would not be there, and for passwords.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"the requirements {path} cannot be read: {reason}", where=where) from None
    for number, line in enumerate(lines, 1):
        words = line.split(" #")[0].strip()
        location = f"{path}:{number}"
        if re.match(r"(-[rce]|--(requirement|constraint|editable)\b|\.{0,2}/)", words):
            todo = "list the packages themselves, and copy code with the recipe's `files`"
            raise UserError(f"{words!r} refers to a file that is not in the image", where=location, todo=todo)
        if _PASSWORD.search(words):
            raise UserError("contains a user name or password, which everyone could read in the image", where=location)
    return path
