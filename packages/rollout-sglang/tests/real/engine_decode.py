"""Captures by stage of a real decode server, whose KV caches come from SGLang's fake transfer.

The server begins to record decoding when two requests run at once. Run by `test_engines.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from live_server import Live, live_server, post

from stepscope import ProfileConfig, capture
from stepscope_report import step_report
from stepscope_report.timeline import load_step
from stepscope_sglang import SglangServer
from stepscope_sglang._capture.publishing import DECODE_MIN

_rooms = count(1)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DECODE_MIN, "2")
        mode = {"mode": "decode", "transfer_backend": "fake", "decode_retraction_backup": "cpu_tensor"}
        changes = {f"disaggregation_{name}": value for name, value in mode.items()}
        with live_server(tmp_path_factory.mktemp("decode"), **changes) as live:
            yield live


@pytest.mark.parametrize(("requests", "state"), [(0, "ok"), (1, "failed"), (2, "ok")])
def test_a_stage_that_ran_and_was_not_recorded_is_a_failure_and_not_idle(
    decoder: Live, requests: int, state: str, tmp_path: Path
) -> None:
    engine = {"by_stage": True, "iterations": {"count": 3}}
    config = ProfileConfig(
        save_path=tmp_path,
        steps="1",
        roles={"rollout": {"ranks": "all", "engine": engine}, "*": {"profiler": "off"}},
        torch={"activities": ["cpu"]},
    )

    def ask(room: int) -> None:
        post(decoder.url, 30, bootstrap_host="2.2.2.2", bootstrap_port=1, bootstrap_room=room)

    with capture(1, engines=[SglangServer(decoder.url)], config=config) as cap, ThreadPoolExecutor() as pool:
        list(pool.map(ask, [next(_rooms) for _ in range(requests)]))
    manifest = cap.result.manifest()
    assert manifest is not None
    assert cap.result.path is not None
    (replica,) = [one for part in manifest.processes for one in part.expected if one.kind == "engine"]
    assert (replica.state, replica.idle) == (state, requests == 0)
    kinds = {one.kind for one in replica.artifacts}
    assert kinds == ({"torch_trace", "engine_passes"} if requests == 2 else set())
    traces = [one for one in replica.artifacts if one.kind == "torch_trace"]
    assert [(one.stage, one.iterations) for one in traces] == ([("decode", 3)] if requests == 2 else [])
    health = step_report(load_step(cap.result.path)).health
    assert health.complete is (state == "ok")
    assert [DECODE_MIN in line for line in health.missing] == ([True] if state == "failed" else [])
