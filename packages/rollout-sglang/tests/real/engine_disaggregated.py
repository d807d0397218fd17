"""A prefill server and a decode server that are one replica. Run by `test_engines.py`.

Each is SGLang's own, in the mode it says. What stands in is the transfer of the KV cache between them: by
SGLang's backend `fake`, with which a server answers as if the other side had done its part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from live_server import live_server, post

from stepscope.files.layout import sidecar_of
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope.testing.engine_conformance import a_capture, assert_complete
from stepscope_sglang import SglangServer

FAKE = {"bootstrap_host": "2.2.2.2", "bootstrap_port": 8998, "bootstrap_room": 1}
"""The address that SGLang itself takes for a side that does not exist."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(prefill, decode)."""
    folder = tmp_path_factory.mktemp
    kind = {"disaggregation_transfer_backend": "fake"}
    with (
        live_server(folder("prefill"), disaggregation_mode="prefill", **kind) as prefill,
        live_server(folder("decode"), disaggregation_mode="decode", **kind) as decode,
    ):
        yield prefill.url, decode.url


def options(artifact: Artifact, tmp_path: Path) -> dict[str, object]:
    file = sidecar_of(Path(a_capture(tmp_path).step_dir, artifact.path))
    return dict(msgspec.json.decode(file.read_bytes(), type=Sidecar).options)


async def test_one_capture_holds_prefill_of_one_and_decode_of_the_other(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    profiler = SglangServer(*pair)
    await asyncio.to_thread(profiler.check)
    assert profiler.world_size == 2
    await profiler.start(a_capture(tmp_path))
    for url in pair:
        await asyncio.to_thread(post, url, 4, **FAKE)
    artifacts = await profiler.stop()
    found = {}
    for each in artifacts:
        assert_complete(each, a_capture(tmp_path))
        assert each.rank is None, "nothing says in which order the servers come"
        found[options(each, tmp_path)["disaggregation_mode"]] = options(each, tmp_path)
    assert set(found) == {"prefill", "decode"}
    assert {mode: said["server"] for mode, said in found.items()} == {
        mode: url.partition("://")[2] for mode, url in zip(("prefill", "decode"), pair, strict=True)
    }
    assert found["prefill"]["prefill_iterations"] == 1
    assert "decode_iterations" not in found["prefill"] or found["prefill"]["decode_iterations"] == 0
    assert found["decode"]["decode_iterations"] == 3
