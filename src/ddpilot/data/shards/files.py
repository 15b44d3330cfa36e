# SPDX-License-Identifier: Apache-2.0
"""Datasets of shards: the base class, and files as shards (JSON lines, Parquet, tar archives as of WebDataset)."""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import json
import lzma
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import IO, Any

from ddpilot.errors import DataError


class ShardedDataset:
    """A dataset of shards, such as files. Each rank and worker reads its own shards.

    A subclass defines `num_shards` and `open`. A class of your own that has both is a dataset of shards as well. If the
    samples differ from epoch to epoch, define `set_epoch(epoch)`, which is called before an epoch is read.
    """

    num_shards: int
    """Number of shards."""

    def open(self, shard: int, skip: int = 0) -> Iterable[Any]:
        """Return an iterable over the records of `shard` (0 to `num_shards` - 1), without the first `skip` records.

        It has to yield the same records each time. Skipping records should cost less than reading them.
        """
        raise NotImplementedError

    def decode(self, record: Any) -> Any:
        """Return the sample of a record of `open`. Called only by the rank and worker that keeps the sample."""
        return record

    def num_samples(self, shard: int) -> int | None:  # noqa: ARG002
        """Return the number of records of `shard`; None if it is unknown before it has been read."""
        return None

    def describe(self, shard: int) -> str:
        """Return the name of `shard` for error messages."""
        return f"shard {shard}"


def is_dataset_of_shards(dataset: Any) -> bool:
    """True if `dataset` has `num_shards` and `open(shard, skip=...)`."""
    return hasattr(dataset, "num_shards") and callable(getattr(dataset, "open", None))


def count_shards(dataset: Any, rank: int) -> tuple[int, tuple[int | None, ...]]:
    """Return the number of shards, and of samples of each, None if unknown. Raises DataError for invalid values."""
    num, did = dataset.num_shards, "making a loader of shards"
    if isinstance(num, bool) or not hasattr(num, "__index__") or num < 1:
        found = f"`num_shards` of {type(dataset).__name__} is {num!r}"
        raise DataError(did, found=found, fix="Let it be 1 or more; check where the shards come from.", rank=rank)
    measure = getattr(dataset, "num_samples", None)
    if not callable(measure):
        return int(num), (None,) * int(num)
    lengths = tuple(measure(shard) for shard in range(num))
    for shard, length in enumerate(lengths):
        if length is not None and (isinstance(length, bool) or not hasattr(length, "__index__") or length < 0):
            found = f"`num_samples({shard})` of {type(dataset).__name__} is {length!r}"
            raise DataError(did, found=found, fix="Return a whole number from 0 on, or None.", rank=rank)
    return int(num), tuple(None if length is None else int(length) for length in lengths)


def describe_shard(dataset: Any, shard: int) -> str:
    """Return the name of a shard for messages: its number, and what the dataset calls it."""
    describe = getattr(dataset, "describe", None)
    name = str(describe(shard)) if callable(describe) else ""
    return f"shard {shard} ({name})" if name not in ("", f"shard {shard}") else f"shard {shard}"


Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Transform = Callable[[Any], Any]


class _Files(ShardedDataset):
    """Shards that are files. Raises DataError if `paths` has no file, or `num_samples` another length."""

    def __init__(
        self, paths: Paths, *, transform: Transform | None = None, num_samples: Sequence[int] | None = None
    ) -> None:
        self.paths = find_files(paths)
        self.transform = transform
        self._num_samples = None if num_samples is None else [int(number) for number in num_samples]
        if self._num_samples is not None and len(self._num_samples) != len(self.paths):
            raise DataError(
                f"making a dataset of {len(self.paths)} files",
                found=f"`num_samples` has {len(self._num_samples)} numbers",
                fix="Give the number of samples of each file, in the order of `dataset.paths`; or leave it out.",
            )

    @property
    def num_shards(self) -> int:  # type: ignore[override]
        """Number of files."""
        return len(self.paths)

    @property
    def is_plain(self) -> bool:
        """True if samples are returned as stored, so that nothing random can be drawn for them."""
        return self.transform is None

    def __repr__(self) -> str:
        num = len(self.paths)
        return f"{type(self).__name__}({num} file{'s' * (num > 1)}, the first: {str(self.paths[0])!r})"

    def num_samples(self, shard: int) -> int | None:
        """Return the number of samples of a file if it is known."""
        return None if self._num_samples is None else self._num_samples[shard]

    def describe(self, shard: int) -> str:
        """Return the path of a file."""
        return self.paths[shard]

    def decode(self, record: Any) -> Any:
        """Return the sample of a record."""
        return record if self.transform is None else self.transform(record)

    def _refuse_skip(self, shard: int, skip: int, num: int) -> None:
        """Raise DataError if a file has fewer than `skip` samples, as it has been cut since they were read."""
        if num < skip:
            raise DataError(
                f"reading {self.paths[shard]} from sample {skip} on",
                found=f"it has {num} samples",
                fix="Restore the file; or start over, if the data has changed.",
            )


class JsonLinesShards(_Files):
    """Files of JSON lines: a sample is the value of a line. Blank lines are skipped.

    - `paths`: files, or a pattern such as "data/*.jsonl". Files that end in .gz, .bz2 or .xz are decompressed.
    - `transform`: called with the value of a line, returns the sample.
    - `num_samples`: the number of samples of each file, if known.
    """

    def open(self, shard: int, skip: int = 0) -> Iterator[bytes]:
        """Yield the lines of a file."""
        number = 0
        with _open(self.paths[shard]) as file:
            for line in file:
                if line.strip():
                    number += 1
                    if number > skip:
                        yield line
        self._refuse_skip(shard, skip, number)

    def decode(self, record: Any) -> Any:
        """Return the sample of a line."""
        return super().decode(json.loads(record))


class ParquetShards(_Files):
    """Parquet files: a sample is a row, as a dict from column to Python value. Needs pyarrow.

    - `paths`: files, or a pattern such as "data/*.parquet".
    - `columns`: names of the columns to read; None: all.
    - `transform`: called with the dict of a row, returns the sample.

    The numbers of rows are read from the files when the dataset is created.
    """

    _ROWS = 1024

    def __init__(
        self, paths: Paths, *, columns: Sequence[str] | None = None, transform: Transform | None = None
    ) -> None:
        super().__init__(paths, transform=transform)
        self.columns = None if columns is None else list(columns)
        self._num_samples = [self._read_num_rows(path) for path in self.paths]

    def open(self, shard: int, skip: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the rows of a file; row groups before the row `skip` are not read."""
        with _import_parquet().ParquetFile(self.paths[shard]) as file:
            groups: list[int] = []
            for number in range(file.num_row_groups):
                num_rows = file.metadata.row_group(number).num_rows
                if groups or num_rows > skip:
                    groups.append(number)
                else:
                    skip -= num_rows
            for batch in file.iter_batches(self._ROWS, row_groups=groups, columns=self.columns) if groups else ():
                yield from batch.slice(skip).to_pylist()
                skip = max(0, skip - batch.num_rows)

    @staticmethod
    def _read_num_rows(path: str) -> int:
        parquet = _import_parquet()
        try:
            return int(parquet.read_metadata(path).num_rows)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            raise DataError(f"reading the metadata of {path}", found=found, fix="Check the file.") from error


class WebDatasetShards(_Files):
    """Tar archives in the format of WebDataset: a sample is the consecutive files of an archive with one basename.

    The basename is the path up to the first dot of the file name. The rest of the name is the key of the file's bytes
    in the sample, a dict: "a/0001.jpg" and "a/0001.seg.png" are {"__key__": "a/0001", "jpg": ..., "seg.png": ...}.

    - `paths`: archives, or a pattern such as "data/*.tar"; .tar.gz and others are decompressed.
    - `transform`: called with this dict, returns the sample.
    - `num_samples`: the number of samples of each archive, if known.
    """

    def open(self, shard: int, skip: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the samples of an archive. Of the first `skip` samples, only the names are read."""
        path, number = self.paths[shard], 0
        with tarfile.open(path) as archive:
            key: str | None = None
            sample: dict[str, Any] = {}
            for member in self._members(archive, path):
                name = PurePath(member.name)
                base, _, extension = name.name.partition(".")
                if base.startswith("__") and base.endswith("__"):
                    continue
                member_key = str(name.parent / base)
                if member_key != key:
                    if key is not None:
                        number += 1
                        if number > skip:
                            yield sample
                    key, sample = member_key, {"__key__": member_key}
                if extension.lower() in sample:
                    found = f"two files {extension!r} of the sample {key!r}"
                    raise DataError(f"reading {path}", found=found, fix="Give each file of a sample its own extension.")
                sample[extension.lower()] = self._read(archive, member) if number >= skip else b""
            if key is not None:
                number += 1
                if number > skip:
                    yield sample
        self._refuse_skip(shard, skip, number)

    @staticmethod
    def _members(archive: tarfile.TarFile, path: str) -> Iterator[tarfile.TarInfo]:
        """Yield the files of an archive; raises DataError if a header is cut, which tarfile takes as the end."""
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # it would collect them all
            if member.isfile():
                yield member
        file: Any = archive.fileobj
        file.seek(archive.offset)
        rest = file.read(tarfile.BLOCKSIZE)
        if rest.strip(b"\0") or (rest and len(rest) < tarfile.BLOCKSIZE) or file.tell() < archive.offset:
            fix = "Copy it again: it was cut, or is damaged."
            raise DataError(f"reading {path}", found=f"no header of a file at byte {archive.offset}", fix=fix)

    @staticmethod
    def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
        file = archive.extractfile(member)
        return b"" if file is None else file.read()


def find_files(paths: Paths) -> list[str]:
    """Return the files of `paths`, those of a pattern sorted. Raises DataError if there are none, or one is missing."""
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found: list[str] = []
    for path in given:
        one = os.fspath(path)
        names = [one] if os.path.exists(one) else sorted(glob.glob(one, recursive=True))
        if not names:
            raise DataError("finding the files of a dataset", found=f"no file {one!r}", fix="Check the path.")
        found += names
    if not found:
        raise DataError("finding the files of a dataset", found="`paths` is empty", fix="Give files or a pattern.")
    if folders := [name for name in found if os.path.isdir(name)]:
        fix = "Give a pattern, such as 'data/*.jsonl'."
        raise DataError("finding the files of a dataset", found=f"a folder {folders[0]!r}", fix=fix)
    return found


def _open(path: str) -> IO[bytes]:
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    file: IO[bytes] = openers.get(PurePath(path).suffix, io.open)(path, "rb")
    return file


def _import_parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        found = "pyarrow is not installed"
        raise DataError("reading a Parquet file", found=found, fix="Install it: pip install pyarrow") from error
    return parquet
