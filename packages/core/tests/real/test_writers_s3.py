"""The mirror in S3, over HTTP: moto's server, s3fs, and the programs that run after a capture."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from socket import gethostname
from urllib.request import Request, urlopen

import moto.server
import pytest
import s3fs

from packages.core.tests.mirrored import a_config, a_step, contents, drain
from stepscope import capture, span
from stepscope.files.layout import RunLayout
from stepscope.files.manifest.parts import fold, read_parts
from stepscope.files.mirror import uncopied
from stepscope.mirror.copy import copy_step, open_store
from stepscope.recording.after import pipeline

pytestmark = pytest.mark.filterwarnings("ignore")
URL = "s3://profiles/run-17"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[s3fs.S3FileSystem]:
    """Provide a bucket, reached as a user's would be: by variables alone."""
    server = moto.server.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "no_proxy": host,
    }.items():
        monkeypatch.setenv(name, value)
    files = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()  # buckets outlive servers
    files.mkdir("profiles")
    yield files
    pipeline.end("the test ended", 30, patient=False)
    server.stop()


def held(files: s3fs.S3FileSystem, folder: str) -> dict[str, bytes]:
    return {name.removeprefix(f"{folder}/"): files.cat_file(name) for name in files.find(folder)}


def test_a_step_is_copied_and_none_of_it_twice(tmp_path: Path, s3: s3fs.S3FileSystem) -> None:
    step = a_step(tmp_path)
    assert copy_step(open_store(URL), step).failed == {}
    copied = held(s3, "profiles/run-17/step_000002")
    assert copied.pop(step.mirror_record(gethostname()).name)
    assert copied == contents(step.root)
    assert copy_step(open_store(URL), step).sent == 0


def test_a_file_that_goes_in_parts_is_whole(tmp_path: Path, s3: s3fs.S3FileSystem) -> None:
    step = a_step(tmp_path, files=0)
    large = step.traces / "actor" / "large.json"
    large.parent.mkdir(exist_ok=True)
    large.write_bytes(os.urandom(1 << 20) * 101)  # s3fs sends parts from 100 MiB on
    assert copy_step(open_store(URL), step).failed == {}
    assert copy_step(open_store(URL), step).sent == 0
    assert s3.cat_file("profiles/run-17/step_000002/traces/actor/large.json") == large.read_bytes()


def test_a_bucket_that_is_not_there_is_named_and_not_made(tmp_path: Path, s3: s3fs.S3FileSystem) -> None:
    outcome = copy_step(open_store("s3://profile/run-17"), a_step(tmp_path))
    reasons = list(outcome.failed.values())
    assert reasons[:3] == ["FileNotFoundError: The specified bucket does not exist"] * 3
    assert s3.ls("") == ["profiles"]


def test_after_a_capture_the_step_is_there(tmp_path: Path, s3: s3fs.S3FileSystem) -> None:
    config = a_config(tmp_path, URL)
    with capture(1, config=config), span("update"):
        pass
    drain()
    step = RunLayout(config.save_path).step(1)
    outcomes = {item.name: item for part in fold(read_parts(step)[0]).processes for item in part.expected}
    assert outcomes["mirror"].state == "ok", outcomes["mirror"].reason
    assert uncopied(step, gethostname(), URL) == []
    copied = held(s3, "profiles/run-17/step_000001")
    assert contents(step.root).items() <= copied.items()
    assert s3.glob("profiles/run-17/run_*.json")
