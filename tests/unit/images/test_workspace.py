"""Where a build keeps its things, and whether they fit."""

import shutil
from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.images.workspace import check_space, make_folders, mksquashfs_options, workspace


def test_the_sites_folder_for_caches_takes_it_all(tmp_path: Path) -> None:
    place = workspace(tmp_path, {"HOME": "/home/me"})
    assert place.variables == {
        "APPTAINER_CACHEDIR": f"{tmp_path}/images/cache",
        "SINGULARITY_CACHEDIR": f"{tmp_path}/images/cache",
        "APPTAINER_TMPDIR": f"{tmp_path}/images/tmp",
        "SINGULARITY_TMPDIR": f"{tmp_path}/images/tmp",
    }
    make_folders(place)
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["cache", "tmp"]
    assert (tmp_path / "images/tmp").stat().st_mode & 0o777 == 0o700


def test_what_the_user_says_stays(tmp_path: Path) -> None:
    place = workspace(tmp_path, {"SINGULARITY_TMPDIR": "/fast", "HOME": "/home/me"})
    assert place.temporary == Path("/fast") and place.variables["APPTAINER_TMPDIR"] == "/fast"
    assert place.cache == tmp_path / "images/cache"


def test_without_a_site_the_builders_own_places_are_looked_at() -> None:
    place = workspace(None, {"HOME": "/home/me", "TMPDIR": "/var/tmp"})
    assert (place.cache, place.temporary) == (Path("/home/me/.apptainer/cache"), Path("/var/tmp"))
    assert place.variables == {}


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "images").write_text("")
    with pytest.raises(UserError, match=r"images/(cache|tmp) cannot be made"):
        make_folders(workspace(tmp_path, {}))


def test_it_fits_or_the_places_and_figures_are_named(tmp_path: Path) -> None:
    place, target = workspace(tmp_path / "site", {}), tmp_path / "images/x.sif"
    free = shutil.disk_usage(tmp_path).free
    check_space(None, target, place)
    check_space(1000, target, place)
    check_space(int(free / 6), target, place)
    with pytest.raises(UserError) as caught:
        check_space(int(free / 3), target, place)  # each alone would fit
    for folder in (place.cache, place.temporary, target.parent):
        assert str(folder) in caught.value.what
    check_space(int(free / 10), target, place)
    with pytest.raises(UserError):
        check_space(int(free / 10), target, place, int(free / 2.5))  # as many root file systems as stages
    assert "GB are free" in caught.value.what and "APPTAINER_TMPDIR" in str(caught.value.todo)


@pytest.mark.parametrize(
    ("flavour", "version", "processors", "memory", "options"),
    [
        ("apptainer", "1.4.5-1", 4, 2048, ("--mksquashfs-args", "-processors 4 -mem 2048M")),
        ("apptainer", "1.5.0", 4, None, ("--mksquashfs-args", "-processors 4")),
        ("apptainer", "1.10.0", None, 512, ("--mksquashfs-args", "-mem 512M")),
        ("apptainer", "1.3.6", 4, 2048, ()),
        ("apptainer", "unknown", 4, 2048, ()),
        ("singularityce", "4.1.0", 4, 2048, ()),
        ("apptainer", "1.4.5", None, None, ()),
    ],
)
def test_mksquashfs_is_held_back_where_that_can_be_said(
    flavour: str, version: str, processors: int | None, memory: int | None, options: tuple[str, ...]
) -> None:
    assert mksquashfs_options(flavour, version, processors, memory) == options
