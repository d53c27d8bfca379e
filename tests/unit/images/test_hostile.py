"""Values that would open a section of the definition file, which Apptainer runs on the host."""

from pathlib import Path
from typing import Any

import pytest

from slurmddp.errors import ExternalError, UserError
from slurmddp.images.base import Base
from slurmddp.images.definition import LARGEST_SECTION, render_definition
from slurmddp.images.dockerfile import convert
from slurmddp.images.image_spec import of_dockerfile
from slurmddp.images.make import Request, build_image
from slurmddp.images.recipe import Ingredients, read_recipe
from slurmddp.images.registry.image import RegistryImage
from slurmddp.images.registry.reference import parse_reference
from tests.registry import Registry

from .conftest import Apptainer

EVIL = "/bin/sh\n%setup\ntouch /tmp/pwned"


@pytest.mark.parametrize("config", [{"Entrypoint": [EVIL]}, {"WorkingDir": EVIL}, {"User": EVIL}, {"Shell": [EVIL]}])
def test_a_hostile_base_in_a_registry_is_refused_before_anything_is_built(
    config: dict[str, Any], apptainer: Apptainer, tmp_path: Path
) -> None:
    with Registry.started(tmp_path / "registry") as registry:
        registry.push("lab/evil", "1.0", {"config": config}, [b"layer"])
        name = registry.reference("lab/evil", "1.0")
        (tmp_path / "Dockerfile").write_text(f'FROM {name}\nRUN true\nCMD ["python"]\n')
        with pytest.raises(ExternalError, match=f"line break or control character in its {next(iter(config))}"):
            build_image(Request(of_dockerfile(tmp_path / "Dockerfile", {}, None), None, tmp_path), [].append)
    assert apptainer.calls == [] and not list(tmp_path.rglob("*.def"))


def test_variables_of_a_base_that_are_not_one_line_are_left_out(apptainer: Apptainer, tmp_path: Path) -> None:
    with Registry.started(tmp_path / "registry") as registry:
        env = [f"CUDA_VERSION={EVIL}", f"A={EVIL}", "NCCL_VERSION=2.26.3"]
        registry.push(
            "lab/evil",
            "1.0",
            {"config": {"Env": env, "Labels": {"a": EVIL}, "Cmd": [EVIL], "OnBuild": [EVIL]}},
            [b"layer"],
        )
        name = registry.reference("lab/evil", "1.0")
        (tmp_path / "Dockerfile").write_text(f'FROM {name}\nRUN true\nCMD ["python"]\n')
        made = build_image(Request(of_dockerfile(tmp_path / "Dockerfile", {}, None), None, tmp_path), [].append)
    assert "%setup" not in made.definition and made.built
    assert "%setup" not in made.built.lock.read_text() and "2.26.3" in made.built.lock.read_text()


@pytest.mark.parametrize("entrypoint", [("/bin/sh\n  %setup\nid",), ("a\nBootstrap: docker\nFrom: evil/image",)])
def test_the_last_check_holds_where_the_first_one_fails(entrypoint: tuple[str, ...], tmp_path: Path) -> None:
    reference = parse_reference("lab.example/a:1")
    base = RegistryImage(reference, "", "", "amd64", "linux", entrypoint=entrypoint)
    (tmp_path / "Dockerfile").write_text('FROM lab.example/a:1\nCMD ["x"]\n')
    with pytest.raises(UserError, match=r"%setup|(?i:bootstrap)"):
        convert(tmp_path / "Dockerfile", bases={"lab.example/a:1": base})


OPENS = ["%setup", " \t%pre", "\x0b%setup", "\x85%setup", "\u3000%setup", "\r%setup", "%POST -c /bin/x", "%%x"]


@pytest.mark.parametrize("line", [*OPENS, "Bootstrap: docker", "bootstrap:x", "BOOT\u017fTRAP: docker", "{{ name }}"])
@pytest.mark.parametrize("place", ["setup", "test", "environment", "title", "labels", "apt", "name"])
def test_no_value_opens_a_section_whatever_let_it_pass(place: str, line: str) -> None:
    # As if no check of a recipe had been made: the text as a whole is checked, too.
    text = f"a\n{line}\nid"
    whole: dict[str, Any] = {
        "setup": (text,), "test": (text,), "apt": (text,), "environment": (("A", text),), "labels": (("a", text),),
        "title": text, "name": text,
    }  # fmt: skip
    image = {"name": "x", "base": Base("docker", "lab.example/a:1"), place: whole[place]}
    with pytest.raises(UserError, match=r"of the definition file|build argument"):
        render_definition(Ingredients(**image), "1")


def test_a_header_is_the_template_s_own(tmp_path: Path) -> None:
    base = Base("docker", "lab.example/a:1")
    object.__setattr__(base, "source", "lab.example/a:1\nInclude: other")
    with pytest.raises(UserError, match="is a header of the definition file"):
        render_definition(Ingredients("x", base), "1")


def test_lines_that_apptainer_takes_for_text_pass() -> None:
    lines = "echo 100%\n# %setup\necho %setup\n Bootstrap: docker\ncat <<END\nsetup:\n  - bootstrap: yes\nEND"
    assert lines in render_definition(Ingredients("x", Base("docker", "lab.example/a:1"), setup=(lines,)), "1")


def test_a_section_that_apptainer_cannot_read_is_refused() -> None:
    image = Ingredients("x", Base("docker", "lab.example/a:1"), setup=("echo " + "x" * LARGEST_SECTION,))
    with pytest.raises(UserError, match=r"section that begins with '%post' .* longer than 64 KiB"):
        render_definition(image, "1")


def test_a_stage_in_a_recipe_s_commands_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text('base: docker://lab.example/a:1\nsetup: ["cat <<E\\nBootstrap: docker\\nE"]\n')
    with pytest.raises(UserError, match="begins a stage"):
        render_definition(read_recipe("./r.yaml", {}, tmp_path, {}), "1")
