# SPDX-License-Identifier: Apache-2.0
"""Datasets whose shards are files: what a sample is, where reading resumes, and files that are damaged."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
from pathlib import Path
from typing import Any

import pytest

from ddpilot import JsonLinesShards, ParquetShards, WebDatasetShards
from ddpilot.data.loaders import make_shard_loader
from ddpilot.errors import DataError
from tests.unit.data.shards.ranks import Ranks


def read(dataset: Any, shard: int = 0, skip: int = 0) -> list[Any]:
    """The samples of a shard."""
    return [dataset.decode(record) for record in dataset.open(shard, skip=skip)]


def take_list(batch: list[Any]) -> Any:
    """A collate function that collates nothing."""
    return batch


LINES = [{"text": "a"}, {"text": "zwei \u2028 Zeilen, \U0001f600"}, 3, None, [1.5]]


def test_json_lines_are_values_without_blank_lines(tmp_path: Path) -> None:
    """Also with a byte order mark, CRLF, a separator of Unicode in a string, and no newline at the end."""
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(value, ensure_ascii=False) for value in LINES]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\n  \n".join(lines).encode())
    dataset = JsonLinesShards(tmp_path / "*.jsonl")
    assert dataset.num_shards == 1
    assert read(dataset) == LINES
    assert read(dataset, skip=3) == LINES[3:]
    assert read(dataset, skip=5) == []
    with pytest.raises(DataError, match="from sample 6 on: it has 5 samples"):
        read(dataset, skip=6)
    assert read(JsonLinesShards([path], transform=str), skip=4) == ["[1.5]"]


@pytest.mark.parametrize(("suffix", "module"), [("gz", gzip), ("bz2", bz2), ("xz", lzma)])
def test_json_lines_are_decompressed(tmp_path: Path, suffix: str, module: Any) -> None:
    """By the end of the file's name; a file that was cut is an error that names it."""
    path = tmp_path / f"a.jsonl.{suffix}"
    content = module.compress("".join(f"{number}\n" for number in range(2000)).encode())
    path.write_bytes(content)
    assert read(JsonLinesShards(path), skip=1990) == list(range(1990, 2000))
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=f"reading sample [0-9]+ of shard 0 .*a.jsonl.{suffix}.*EOFError"):
        Ranks([JsonLinesShards(path)], global_batch_size=100).read()


def test_json_line_that_was_cut_is_an_error(tmp_path: Path) -> None:
    """It names the sample and the file."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": ')
    with pytest.raises(DataError, match=r"decoding sample 1 of shard 0 \(.*a.jsonl\) .*JSONDecodeError"):
        Ranks([JsonLinesShards(path)], global_batch_size=2).read()


def test_files_are_found_and_counted(tmp_path: Path) -> None:
    """A pattern without files, a folder, and lengths of another number of files are refused."""
    for name in "ba":
        (tmp_path / f"{name}.jsonl").write_text("1\n2\n")
    dataset = JsonLinesShards(str(tmp_path / "*.jsonl"), num_samples=[2, 2])
    assert [Path(path).name for path in dataset.paths] == ["a.jsonl", "b.jsonl"]
    assert len(make_shard_loader(dataset, rank=0, world_size=1, global_batch_size=3)) == 2
    for paths, found in ((tmp_path / "*.json", "no file"), ([], "is empty"), (tmp_path, "a folder")):
        with pytest.raises(DataError, match=found):
            JsonLinesShards(paths)
    with pytest.raises(DataError, match="`num_samples` has 1 numbers"):
        JsonLinesShards(tmp_path / "*.jsonl", num_samples=[2])


def test_parquet_rows_are_samples(tmp_path: Path) -> None:
    """Row groups before the sample are left out, and lengths are known beforehand."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    numbers = list(range(5000))
    table = pyarrow.table({"number": numbers, "text": [str(number) for number in numbers]})
    parquet.write_table(table, path, row_group_size=1500)
    dataset = ParquetShards(path, columns=["number"])
    assert dataset.num_samples(0) == 5000
    for skip in (0, 1, 1024, 1499, 1500, 1501, 2999, 4000, 4999, 5000):
        assert [row["number"] for row in read(dataset, skip=skip)] == numbers[skip:]
    assert read(ParquetShards(path), skip=4999) == [{"number": 4999, "text": "4999"}]
    assert len(make_shard_loader(dataset, rank=0, world_size=1, global_batch_size=64)) == 79
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"reading the metadata of .*a.parquet"):
        ParquetShards(path)


def write_tar(path: Path, files: dict[str, bytes], mode: Any = "w") -> None:
    """Write an archive of `files`."""
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


FILES = {
    "./x/0.JPG": b"image 0",
    "./x/0.seg.png": b"mask 0",
    "__meta__": b"left out",
    "x/1.jpg": b"image 1" * 1000,
    "y.d/1.jpg": b"",
    "y.d/1.cls": b"7",
    "y.d/2": b"no extension",
}
SAMPLES = [
    {"__key__": "x/0", "jpg": b"image 0", "seg.png": b"mask 0"},
    {"__key__": "x/1", "jpg": b"image 1" * 1000},
    {"__key__": "y.d/1", "jpg": b"", "cls": b"7"},
    {"__key__": "y.d/2", "": b"no extension"},
]


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_tar_samples_are_files_with_one_basename(tmp_path: Path, mode: str) -> None:
    """Extensions are keys, in lower case; from any sample on; compressed as well."""
    path = tmp_path / "a.tar"
    write_tar(path, FILES, mode)
    dataset = WebDatasetShards(path)
    for skip in range(5):
        assert read(dataset, skip=skip) == SAMPLES[skip:]
    with pytest.raises(DataError, match="it has 4 samples"):
        read(dataset, skip=5)


def test_tar_that_was_cut_is_an_error(tmp_path: Path) -> None:
    """Wherever it was: in a file, in a header, or within the mark at the end."""
    path = tmp_path / "a.tar"
    write_tar(path, FILES)
    content = path.read_bytes()
    with tarfile.open(path) as archive:
        ends = [member.offset for member in archive.getmembers()][1:]
    for cut in (100, 600, *(end + 100 for end in ends), *(end + 513 for end in ends[:3])):
        path.write_bytes(content[:cut])
        with pytest.raises((DataError, tarfile.TarError)):
            read(WebDatasetShards(path))
    write_tar(path, {"0.jpg": b"", "0.JPG": b""})
    with pytest.raises(DataError, match="two files 'JPG' of the sample '0'"):
        read(WebDatasetShards(path))


def test_shards_of_files_make_batches(tmp_path: Path) -> None:
    """Archives on three ranks: each sample once, in the batches of one rank."""
    for shard in range(5):
        write_tar(tmp_path / f"{shard}.tar", {f"{shard}-{number}.cls": b"%d" % number for number in range(shard * 2)})
    keys = []
    for world_size in (1, 3):
        datasets = [
            WebDatasetShards(tmp_path / "*.tar", transform=lambda one: one["__key__"]) for _ in range(world_size)
        ]
        batches = Ranks(datasets, global_batch_size=4, shuffle=True, collate_fn=take_list).read()
        keys.append([key for parts in batches for part in parts if part.count for key in part.data])
    assert keys[0] == keys[1]
    assert sorted(keys[0]) == [f"{shard}-{number}" for shard in range(5) for number in range(shard * 2)]
