"""The files of an engine whose actor is on a host with a disk of its own.

That disk is another folder here, below which every path of the "other host" lies.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from packages.core.tests.runs import manifest_of
from stepscope import ProfileConfig, capture
from stepscope.engines import EngineCapture, actor_call
from stepscope.engines.actor_call import ActorLine, CallFailedError
from stepscope.engines.artifacts import publish
from stepscope.files.layout import RunLayout, sidecar_of
from stepscope.files.sidecar import Artifact
from stepscope.testing.engine_conformance import a_capture, files_below
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler


class OtherHost:
    """An actor's line: what is called there sees `disk` as its root."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk
        self.calls = 0

    async def call(self, fn: Callable[..., object], *args: object, keep: bool = False) -> Any:
        self.calls += 1
        path, *rest = args
        try:
            result = fn(None, f"{self.disk}{path}", *rest)
        except OSError as error:
            raise CallFailedError(f"{type(error).__name__}: {error}") from error
        return [name.removeprefix(str(self.disk)) for name in result] if isinstance(result, list) else result


def put_trace(disk: Path | str, given: EngineCapture, name: str, content: bytes) -> Artifact:
    """Return a trace on the other host's disk, with its sidecar."""
    beyond = msgspec.structs.replace(
        given, out_dir=f"{disk}{given.out_dir}", step_dir=f"{disk}{given.step_dir}"
    )
    path = Path(beyond.out_dir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return publish(path, beyond, kind="vllm_trace", tool="vllm", rank=3)


def remove(step_dir: str, artifact: Artifact) -> None:
    Path(step_dir, artifact.path).unlink()


def put_empty(*paths: str) -> None:
    for path in paths:
        Path(path).touch()


async def brought(line: OtherHost, given: EngineCapture, *artifacts: Artifact) -> dict[str, str]:
    return await actor_call.bring_home(cast(ActorLine, line), given.step_dir, artifacts)


async def test_a_trace_on_a_hosts_own_disk_comes_home_whole_with_its_sidecar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_call, "PIECE", 1000)
    given, line = a_capture(tmp_path), OtherHost(tmp_path / "other")
    content = bytes(range(256)) * 10
    artifact = put_trace(line.disk, given, "a.pt.trace.json.gz", content)
    assert await brought(line, given, artifact) == {}
    home = Path(given.step_dir) / artifact.path
    assert home.read_bytes() == content
    assert sidecar_of(home).read_bytes() == sidecar_of(Path(f"{line.disk}{home}")).read_bytes()
    assert sorted(path.name for path in home.parent.iterdir()) == [home.name, sidecar_of(home).name]


async def test_a_recording_that_is_a_folder_comes_home_with_its_empty_files(tmp_path: Path) -> None:
    given, line = a_capture(tmp_path), OtherHost(tmp_path / "other")
    artifact = put_trace(line.disk, given, "a_ascend_pt/FRAMEWORK/torch.op_range", b"operators")
    artifact = msgspec.structs.replace(artifact, path=artifact.path.partition("/FRAMEWORK")[0])
    folder = Path(given.step_dir) / artifact.path
    put_empty(f"{line.disk}{folder}/empty", f"{line.disk}{folder}.meta.json")
    assert await brought(line, given, artifact) == {}
    assert [path.name for path in files_below(str(folder))][:2] == [
        "torch.op_range",
        "torch.op_range.meta.json",
    ]
    assert (folder / "empty").read_bytes() == b""


async def test_what_is_here_already_is_not_asked_for(tmp_path: Path) -> None:
    given, line = a_capture(tmp_path), OtherHost(tmp_path / "other")
    artifact = put_trace("", given, "a.pt.trace.json.gz", b"shared")
    assert await brought(line, given, artifact) == {}
    assert line.calls == 0


async def test_what_cannot_be_brought_is_named_with_the_reason(tmp_path: Path) -> None:
    given, line = a_capture(tmp_path), OtherHost(tmp_path / "other")
    artifact = put_trace(line.disk, given, "a.pt.trace.json.gz", b"gone")
    remove(f"{line.disk}{given.step_dir}", artifact)
    left = await brought(line, given, artifact)
    assert "No such file" in left[f"artifacts on {artifact.host}"]
    assert not files_below(given.step_dir)


async def test_no_file_is_brought_to_a_place_outside_of_the_step(tmp_path: Path) -> None:
    given, line = a_capture(tmp_path), OtherHost(tmp_path / "other")
    artifact = put_trace(line.disk, given, "a.pt.trace.json.gz", b"other")
    outside = Path(f"{line.disk}{given.step_dir}").parent / "outside.json"
    outside.write_bytes(b"{}")
    left = await brought(line, given, msgspec.structs.replace(artifact, path="../outside.json"))
    assert "outside of" in left[f"artifacts on {artifact.host}"]
    assert not (Path(given.step_dir).parent / outside.name).exists()


class Elsewhere(FakeEngineProfiler):
    """Leaves its files on another host, and nobody brings them."""

    async def stop(self) -> list[Artifact]:
        artifacts = await super().stop()
        for artifact in artifacts:
            remove(self.step_dir, artifact)
        return [msgspec.structs.replace(artifact, host="other-host") for artifact in artifacts]

    async def start(self, given: EngineCapture) -> None:
        self.step_dir = given.step_dir
        await super().start(given)


async def test_a_trace_that_stayed_on_another_host_is_partial_and_says_where_it_is(tmp_path: Path) -> None:
    config = ProfileConfig(save_path=tmp_path, steps=[1], roles={"rollout": {"ranks": "all"}})
    async with capture(1, engines=[Elsewhere(FakeEngine())], config=config) as cap:
        pass
    manifest = manifest_of(cap.result)
    (item,) = [item for part in manifest.processes for item in part.expected if item.name == "replica 0"]
    assert item.state == "partial"
    assert f"other-host, below {RunLayout(tmp_path).step(1).root} " in str(item.reason)
