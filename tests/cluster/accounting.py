"""The variant of the cluster that keeps accounts: slurmdbd over MariaDB, both on the controller's host."""

import os
from pathlib import Path

WITHOUT = """\
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
"""
WITH = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=ctl
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
"""
SLURMDBD = """\
AuthType=auth/munge
DbdHost=ctl
SlurmUser=slurm
PidFile=/run/slurm/slurmdbd.pid
LogFile=/var/log/slurm/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StorageLoc=slurm
# What is written is seen by the next sacct, rather than when some has come together.
CommitDelay=1
"""


def configure(slurm: Path, slurm_user: int) -> None:
    """Change the folder that the hosts see as /etc/slurm. slurmdbd reads its own file only where nobody else may."""
    path = slurm / "slurm.conf"
    text = path.read_text()
    assert WITHOUT in text, path
    path.write_text(text.replace(WITHOUT, WITH))
    configuration = slurm / "slurmdbd.conf"
    configuration.write_text(SLURMDBD)
    configuration.chmod(0o600)
    os.chown(configuration, slurm_user, slurm_user)
