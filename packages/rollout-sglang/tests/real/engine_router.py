"""Tests of two real servers behind sglang's router, and as prefill and decode server of one replica.

Both servers run every request that the router sends to the pair, because real disaggregation needs CUDA for
the transfer of the KV cache. Run by `test_engines.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from live_server import Live, live_router, live_server, post

from stepscope import ProfileConfig, capture
from stepscope.engines.protocol import Iterations
from stepscope.errors import EngineError
from stepscope.files.layout import RunLayout
from stepscope.testing.engine_conformance import a_capture, assert_complete
from stepscope_report.timeline import load_step, merge_step
from stepscope_sglang import SglangServer


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Live]]:
    folders = [tmp_path_factory.mktemp(name) for name in ("prefill", "decode")]
    with ExitStack() as stack, ThreadPoolExecutor() as pool:  # started at once, both take as long as one
        yield list(pool.map(lambda folder: stack.enter_context(live_server(folder)), folders))


@pytest.fixture(scope="module")
def router(servers: list[Live], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    urls = [live.url for live in servers]
    words = ["--policy", "round_robin", "--worker-urls", *urls]
    with live_router(tmp_path_factory.mktemp("router"), *words) as router:
        yield router


@pytest.fixture(scope="module")
def pairing(servers: list[Live], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Provide the router that sends each request to a prefill and to a decode server."""
    prefill, decode = servers
    words = ["--pd-disaggregation", "--prefill", prefill.url, "9000", "--decode", decode.url]
    with live_router(tmp_path_factory.mktemp("pairing"), *words) as router:
        yield router


def config_of(folder: Path) -> ProfileConfig:
    return ProfileConfig(
        save_path=str(folder),
        steps="1",
        roles={"rollout": {"ranks": "all"}, "*": {"ranks": "first"}},
        torch={"activities": ["cpu"]},
    )


async def ask(url: str, requests: int, tokens: int) -> None:
    await asyncio.gather(*(asyncio.to_thread(post, url, tokens) for _ in range(requests)))


async def test_every_server_behind_a_router_is_a_replica_that_is_recorded(
    router: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    replicas = await asyncio.to_thread(SglangServer.behind, router)
    async with capture(1, engines=replicas, config=config) as cap:
        await ask(router, 6, 3)
    manifest = cap.result.manifest()
    assert manifest is not None
    assert manifest.problems() == []
    replicas_by_name = {item.name: item for part in manifest.processes for item in part.expected}
    assert [replicas_by_name[f"replica {number}"].artifacts[0].rank for number in (0, 1)] == [0, 1]


async def test_the_router_itself_is_refused_by_naming_both(
    router: str, servers: list[Live], tmp_path: Path
) -> None:
    first, second = sorted(server.url for server in servers)
    with pytest.raises(EngineError, match=f"router before {first}, {second}"):
        await SglangServer(router).start(a_capture(tmp_path))


async def test_a_replica_of_a_prefill_and_a_decode_server_is_one_capture_and_one_timeline(
    pairing: str, servers: list[Live], tmp_path: Path
) -> None:
    replica = SglangServer(*(live.url for live in servers))
    config = config_of(tmp_path)
    async with capture(1, engines=[replica], config=config) as cap:
        await ask(pairing, 2, 4)
    manifest = cap.result.manifest()
    assert manifest is not None
    assert manifest.problems() == []
    (entry,) = [item for part in manifest.processes for item in part.expected if item.name == "replica 0"]
    names = sorted(Path(artifact.path).name for artifact in entry.artifacts)
    assert [name.split("_")[0] for name in names] == [
        live.url.partition("://")[2].replace(":", "-") for live in sorted(servers)
    ]
    assert {artifact.rank for artifact in entry.artifacts} == {None}  # the order of the servers is unknown
    layout = RunLayout(tmp_path).steps()[1]
    assert load_step(layout.root).manifest is not None
    assert merge_step(layout.root).problems == ()


async def test_a_count_is_reached_on_each_part_by_itself(
    pairing: str, servers: list[Live], tmp_path: Path
) -> None:
    replica = SglangServer(*(live.url for live in servers))
    wanted = msgspec.structs.replace(a_capture(tmp_path), iterations=Iterations(count=2))
    await replica.start(wanted)
    await ask(pairing, 1, 6)
    artifacts = await replica.stop()
    assert len(artifacts) == 2
    for artifact in artifacts:
        assert_complete(artifact, wanted)
        assert artifact.truncated is None


async def test_a_part_that_dies_costs_its_own_file_and_is_named(servers: list[Live], tmp_path: Path) -> None:
    """This test comes last, because it kills a server."""
    prefill, decode = servers
    replica = SglangServer(prefill.url, decode.url)
    wanted = a_capture(tmp_path)
    await replica.start(wanted)
    await ask(prefill.url, 1, 3)
    os.killpg(decode.group, signal.SIGKILL)
    (artifact,) = await asyncio.wait_for(replica.stop(), 60)
    assert_complete(artifact, wanted)
    assert decode.url in replica.ignored["files"]
