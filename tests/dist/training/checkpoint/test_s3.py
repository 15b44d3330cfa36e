# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a bucket of a real S3 server: killed in uploads, resumed elsewhere, exactly; and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddpilot import RankError
from tests.dist.training.bodies import launch
from tests.dist.training.checkpoint.s3_bodies import open_loops, train

pytest.importorskip("moto", reason="the S3 server of these tests is not installed: pip install 'moto[s3]' flask s3fs")
pytest.importorskip("flask_cors", reason="the S3 server of these tests needs flask-cors")
pytest.importorskip("s3fs", reason="fsspec needs s3fs for s3://")

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of an S3 server, and the variables with which its users find it; ended after the module."""
    command = [sys.executable, "-m", "tests.dist.training.checkpoint.s3_server"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, "the server did not start"
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {
                "AWS_ENDPOINT_URL": url,
                "AWS_ACCESS_KEY_ID": "me",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
                "AWS_CONFIG_FILE": os.devnull,
                "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            }.items():
                patch.setenv(name, value)
            yield url
        process.stdin.close()


def files(server: str) -> list[str]:
    """What is in "my run" of the bucket, by the server's plain interface."""
    with urllib.request.urlopen(f"{server}/bucket?list-type=2&prefix=my%20run/", timeout=20) as response:
        return sorted(re.findall("<Key>my run/(.*?)</Key>", response.read().decode()))


def test_resume_is_exact_after_kills_in_uploads_on_machines_without_a_shared_disk(
    server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL before the manifest, then in the middle of the files; the next runs have other disks and world sizes.

    The first loses the checkpoint that it was uploading, since its disk is gone. The second one's disk is there again:
    nothing is lost.
    """
    alone = launch(1, train, str(tmp_path / "alone"))[0]
    urllib.request.urlopen(urllib.request.Request(f"{server}/bucket", method="PUT"), timeout=20).close()
    url = "s3://bucket/my run"
    with pytest.raises(RankError, match="SIGKILL"):
        launch(2, train, url, tmp_path / "a", killed_at="000002-step-6/manifest.json")
    left = files(server)
    assert "save-000001-step-3/manifest.json" in left
    assert "save-000002-step-6/state.pt" in left
    assert "save-000002-step-6/manifest.json" not in left
    with pytest.raises(RankError, match="SIGKILL"):
        launch(2, train, url + "/", tmp_path / "b", killed_at="000003-step-6/rank-0.pt")
    assert (tmp_path / "b" / "1").is_dir(), "the other rank has downloaded the checkpoint for itself"
    left = files(server)
    assert not [name for name in left if name.startswith("save-000002")], "the interrupted upload was cleared away"
    assert "save-000003-step-6/state.pt" in left
    capfd.readouterr()
    resumed = launch(3, train, url, tmp_path / "b")
    said = capfd.readouterr().err
    assert "save-000003-step-6 was uploaded to s3://bucket/my run: an earlier run was interrupted in that" in said
    assert "resuming from s3://bucket/my run/save-000003-step-6: epoch 2" in said
    for rank in resumed:
        assert (rank["first"], rank["num_updates"]) == (6, 9)
        for name, value in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], value, rtol=0, atol=1e-12)
    manifests = [name for name in files(server) if name.endswith("manifest.json")]
    assert manifests == ["save-000003-step-6/manifest.json", "save-000004-step-9/manifest.json"]
    assert "writer.json" not in files(server)


def test_loop_refuses_a_bucket_that_is_missing_and_missing_credentials(server: str, tmp_path: Path) -> None:
    """On all ranks alike, before training starts, with what to do; no bucket is made."""
    for raised in launch(2, open_loops, ["s3://missing/run"], tmp_path, "s3://missing/run2"):
        assert raised[0].startswith("writing s3://missing/run/writer.json: The specified bucket does not exist")
        assert "Training has not started. Create the bucket" in raised[0]
        assert "Unable to locate credentials" in raised[1]
        assert "AWS_ACCESS_KEY_ID" in raised[1]
