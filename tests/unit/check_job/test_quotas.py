"""Quotas, from what the commands of users printed on their sites. The commands are stand-ins; the parser is ours."""

import os
from pathlib import Path

import pytest

from slurmddp.launch import quotas
from slurmddp.launch.quotas import Quota
from tests.helpers import Desk

GIB = 1 << 30
#: From the storage pages of DDBJ, OzSTAR and Mila, and from quota(1) on an NFS home.
DDBJ = "/lustre7 982177580 0 1000000000 - 443208230 0\n0 -\nuid 1001 is using default file quota setting\n"
OZSTAR = "              /fred [1041408]  5242880 6291456       -     [0]       0       0       -\n"
OVER = "/lustre7\n   5242880*  4194304 5242880  6d23h   120000  0  121000       -\n"
NFS = """\
Disk quotas for user alice (uid 1001):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
nas:/export/home  3145728* 2097152 4194304 1795500000     900       0    1000       0
"""
SCALE = """\
mmlsquota::HEADER:version:reserved:reserved:filesystemName:quotaType:id:name:blockUsage:blockQuota:blockLimit:blockInDoubt:blockGrace:filesUsage:filesQuota:filesLimit:filesInDoubt:filesGrace:remarks:quota:defQuota:fid:filesetname:
mmlsquota::0:1:::gpfs01:USR:1234:me:2097152:10485760:12582912:0:none:4000:0:500000:0:none:e:on:off:::
mmlsquota::0:1:::gpfs01:GRP:500:lab:9999999:0:0:0:none:1:0:0:0:none:e:on:off:::
"""


def asked(desk: Desk, monkeypatch: pytest.MonkeyPatch, mount: str, **programs: str) -> list[Quota]:
    for name, text in programs.items():
        desk.program(name, f"#!/bin/bash\n{text}\n")
    monkeypatch.setenv("PATH", f"{desk.bin}:/usr/bin:/bin")
    mounts = desk.write("mounts", f"none / tmpfs rw 0 0\n{mount.format(here=desk.project)}\n")
    return quotas.quotas(desk.project, Path(mounts))


def cat(text: str) -> str:
    return f"cat <<'E'\n{text}E"


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (DDBJ, (17822420 << 10, None)),
        (OZSTAR.replace("/fred", "/lustre7"), (5250048 << 10, None)),
        (OVER, (0, 1000)),
        ("lfs quota: '/home/x' not on a mounted Lustre filesystem\n", None),
        ("/lustre7 100 0 0 - 5 0 0 -\n", None),
        ("/lustre7 100 0\n", None),
    ],
)
def test_lustre(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, said: str, left: tuple[int | None, int | None] | None
) -> None:
    text = said.replace("/lustre7", str(desk.project))
    lfs = f'if [[ $1 == project ]]; then echo "7 P $3"; elif [[ $3 == -g ]]; then echo none; else\n{cat(text)}\nfi'
    found = asked(desk, monkeypatch, "mgs@tcp:/lus {here} lustre rw 0 0", lfs=lfs)
    owners = ("your", "project 7's")
    assert found == ([] if left is None else [Quota(whose, str(desk.project), *left) for whose in owners])


def test_nfs_and_storage_scale(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(desk.project)
    found = asked(desk, monkeypatch, "nas:/export/home {here} nfs4 rw 0 0", quota=f"{cat(NFS)}\nexit 1")
    assert found == [Quota("your", here, GIB, 100)]
    found = asked(desk, monkeypatch, "/dev/gpfs01 {here} gpfs rw 0 0", mmlsquota=f"[[ $2 == gpfs01 ]] && {cat(SCALE)}")
    assert found == [Quota("your", here, 10 * GIB, 496000)]


def test_nothing_that_a_command_does_is_an_error(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "_PATIENCE", 0.2)
    assert asked(desk, monkeypatch, "nas:/x {here} nfs rw 0 0", quota="sleep 9") == []
    assert asked(desk, monkeypatch, "nas:/x {here} nfs rw 0 0", quota="head -c 99 /dev/urandom; exit 3") == []
    (desk.bin / "quota").unlink()
    assert asked(desk, monkeypatch, "nas:/x {here} nfs rw 0 0") == []
    assert quotas.quotas(desk.project, desk.project / "none") == []
    odd = desk.project / "a b"
    odd.mkdir()
    mounts = desk.write("mounts", f"dev {str(odd).replace(' ', chr(92) + '040')} ext4 rw 0 0\n")
    desk.program("quota", f'#!/bin/bash\n[[ "$4" == "{odd}" ]] && echo "dev 1 0 2 0 1 0 0 0"\n')
    monkeypatch.setenv("PATH", f"{desk.bin}{os.pathsep}/usr/bin:/bin")
    assert quotas.quotas(odd, Path(mounts)) == [Quota("your", str(odd), 1024, None)]
