# SPDX-License-Identifier: Apache-2.0
"""The accounts of a `Cluster`: a MariaDB in its folder, and the slurmdbd that keeps what sacct reports in it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

NEEDED = ("slurmdbd", "mariadbd", "sacctmgr", "sacct")
_TABLES = ("mysql_system_tables.sql", "mysql_performance_tables.sql")
_SHARE = Path("/usr/share/mysql")
_MARIADB = (
    "mariadbd",
    "--no-defaults",
    "--user=root",
    "--innodb-log-file-size=16M",
    "--innodb-flush-log-at-trx-commit=0",
)
_CONF = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost={host}
DbdAddr={address}
DbdPort={port}
SlurmUser=root
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
"""
SLURM_CONF = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={address}
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
AccountingStorageTRES=gres/gpu
"""
"""What slurm.conf has to say about it."""


def why_not(path: str) -> str:
    """Why no accounts can be kept here, with programs from `path`; "" if they can."""
    missing = [name for name in NEEDED if shutil.which(name, path=path) is None]
    missing += [name for name in _TABLES if not (_SHARE / name).exists()]
    if missing:
        return (
            f"accounts of Slurm need what is not installed here: {', '.join(missing)} (slurmdbd, mariadb-server-core)"
        )
    return ""


def prepare(folder: Path, *, host: str, address: str, port: int) -> None:
    """Write slurmdbd's configuration, and the tables that an empty MariaDB needs."""
    conf = folder / "slurmdbd.conf"
    conf.write_text(_CONF.format(folder=folder, host=host, address=address, port=port))
    conf.chmod(0o600)
    (folder / "mariadb").mkdir()
    text = "create database mysql;\nuse mysql;\n" + "\n".join((_SHARE / name).read_text() for name in _TABLES)
    words = [*_MARIADB, "--bootstrap", f"--datadir={folder / 'mariadb'}"]
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"making the tables of MariaDB:\n{done.stderr[-2000:]}")


def socket_path(folder: Path) -> Path:
    """Where the MariaDB listens, and nowhere else: anybody who reaches it may read and write."""
    return folder / "mariadb.socket"


def mariadb_words(folder: Path) -> list[str]:
    """The command of the MariaDB."""
    files = [f"--datadir={folder / 'mariadb'}", f"--socket={socket_path(folder)}"]
    files.append(f"--pid-file={folder / 'mariadbd.pid'}")
    return [*_MARIADB, *files, "--skip-networking", "--skip-grant-tables"]
