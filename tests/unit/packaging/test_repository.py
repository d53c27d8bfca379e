"""Files of the repository that would drift apart unnoticed: lock, version, hooks, and the paths that pages name."""

import ast
import re
import sys

import pytest
import yaml
from packaging.requirements import Requirement

from slurmddp import __version__
from tests.helpers import ROOT


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_the_lock_pins_what_pyproject_asks_for() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    pins: dict[str, list[str]] = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if not line.startswith("#"):
            pin = Requirement(line)
            (exact,) = pin.specifier
            assert exact.operator == "==" and not pin.url, line
            pins.setdefault(pin.name, []).append(exact.version)
    for wanted in map(Requirement, asked):
        if wanted.name != project["name"]:
            for version in pins[wanted.name.lower()]:
                assert wanted.specifier.contains(version), f"{wanted} is locked at {version}: make lock"


def test_the_lock_holds_no_address_and_no_cuda_package() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in text and "nvidia" not in text and "index-url" not in text


def test_every_test_that_the_security_page_names_exists() -> None:
    page = (ROOT / "tests/security.md").read_text()
    named = re.findall(r"\b((?:unit|programs|runtime|cluster)/[\w/]+\.py)(?:::(\w+))?", page)
    for path, name in named:
        file = ROOT / "tests" / path
        assert file.is_file(), f"tests/security.md names {path}"
        assert not name or re.search(rf"(def|class) {name}\b", file.read_text()), f"{path}::{name}"
    assert named


def test_citation_and_changelog_have_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    assert versions[0] == "Unreleased" and len(versions) == len(set(versions))
    assert __version__ in versions or f"{__version__} will be the first" in changelog


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_citation_and_pyproject_say_the_same() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["title"] == project["name"]
    assert citation["abstract"] == project["description"]
    assert citation["license"] == project["license"]["text"]
    assert citation["keywords"] == project["keywords"]


def test_the_hooks_of_pre_commit_are_the_checks_of_make_lint() -> None:
    """Local hooks only: a hook from a repository would need internet."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    assert all(hook["language"] == "system" for hook in repository["hooks"])
    hooks = {re.sub(r"(\.venv/bin/)| --force-exclude", "", hook["entry"]) for hook in repository["hooks"]}
    recipe = (ROOT / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0]
    checks = {
        re.sub(r" \.$| --check", "", line) for line in re.findall(r"^\t\$\(BIN\)/(.+?)(?: \.)?$", recipe, re.MULTILINE)
    }
    assert hooks == checks | {"shellcheck -x"}
    assert "shellcheck -x" in recipe


def test_every_path_and_name_that_contributing_names_exists() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"`([\w.-]+/[\w./-]*)`", page)) | set(re.findall(r"\]\((?!https:)([^)#]+)\)", page))
    paths = {path for path in paths if "NAME" not in path}
    assert len(paths) > 40
    for path in paths:
        assert (ROOT / path).exists(), f"CONTRIBUTING.md names {path}"
        assert (ROOT / path).is_dir() == path.endswith("/") or path == "slurmddp/runtime", path
    for target in re.findall(r"\bmake ([a-z][a-z-]*)", page):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"make {target}"


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("JOB", "slurmddp/shared/schemas.py"),
        ("runtime_job", "slurmddp/job/plan/program.py"),
        ("plan_stop_lead", "slurmddp/job/plan/recovery.py"),
        ("plan_recovery", "slurmddp/job/plan/recovery.py"),
        ("requeue", "slurmddp/job/site.py"),
        ("NodeSettings", "slurmddp/runtime/preflight/node_settings.py"),
        ("ALONE", "slurmddp/runtime/preflight/checks/__init__.py"),
        ("SAME", "slurmddp/runtime/preflight/checks/__init__.py"),
        ("Injected", "tests/cluster/faults.py"),
        ("kill_agent", "tests/cluster/faults.py"),
        ("SCENARIOS", "tests/cluster/proof.py"),
        ("Scenario", "tests/cluster/proof.py"),
    ],
)
def test_the_names_in_contributing_are_in_the_files_that_it_names(name: str, file: str) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert f"`{name}`" in page and f"`{file}`" in page
    defined: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    assert name in defined


#: The modules that may use private names of a library, and those of Python itself that any module may use.
_PRIVATE_OF = {"torch_private.py", "agent/accelerate.py"}
_OF_PYTHON = {"_exit", "_fields", "_replace", "_asdict", "_run_module_as_main", "_current_frames", "_run_exitfuncs"}


def test_private_names_of_torch_and_accelerate_stand_in_one_module_each() -> None:
    folder = ROOT / "slurmddp" / "runtime"
    trees = {str(path.relative_to(folder)): ast.parse(path.read_text()) for path in folder.rglob("*.py")}
    trees |= {str(path): ast.parse(path.read_text()) for path in (ROOT / "slurmddp" / "shared").rglob("*.py")}
    ours = {name for tree in trees.values() for name in _defined(tree)} | _OF_PYTHON
    used = {name: sorted(set(_private_names(tree)) - ours) for name, tree in trees.items()}
    assert {name for name, names in used.items() if names} == _PRIVATE_OF, used
    assert "_monitor_workers" in used["torch_private.py"] and "_validate_launch_command" in used["agent/accelerate.py"]


def _is_private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def _defined(tree: ast.AST) -> set[str]:
    """The private names that a module makes: functions, classes, variables, and attributes of its own objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            found.add(node.attr)
    return set(filter(_is_private, found))


def _private_names(tree: ast.AST) -> list[str]:
    """The private names that a module takes from elsewhere: by a dot, an import, or getattr and hasattr."""
    found: list[object] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not _is_self(node.value):
            found.append(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found += [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "_private"):
            found += [each.value for each in node.args if isinstance(each, ast.Constant)]
    return [str(name) for name in found if _is_private(name)]


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
