"""A captured generation of a real SGLang engine, compared with start_profile and stop_profile by hand.

The table has ms of the start and the stop around one generation, CPU ms of both in this process, ms of the
generation, and bytes of the files. `by hand` passes SGLang the same options as `capture`, and the recording
also begins with the next forward pass; it neither checks nor describes the files. `defaults` is start_profile
without options, which records stacks and shapes at once. Run this with the Python of an environment with
SGLang; `dev.py test --engines sglang-0.5.23` makes one.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _measure import (
    ALONE,
    CAPTURE,
    HAND,
    OFF,
    arguments,
    captures_of_an_engine,
    header,
    interleaved,
    table,
    verdict,
)

from stepscope import ProfileConfig, capture

ROUNDS = 9
TOKENS, REQUESTS = 16, 4
DEFAULTS = "defaults"
LIGHT = {"activities": ["CPU"], "with_stack": False, "record_shapes": False, "start_step": 1}


class Bench:
    def __init__(self, engine: Any, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        self.steps = itertools.count(2, 2)
        self.size: dict[str, int] = {}
        """{contender: bytes of the files of its latest round}."""
        self.generating: dict[str, list[float]] = {}
        """{contender: ms of each generation}."""
        self.cpu: dict[str, list[float]] = {}
        """{contender: CPU ms of this process for each start and stop}."""
        self.config = ProfileConfig(
            save_path=str(folder / CAPTURE),
            steps=["0::2"],
            roles={"rollout": {"ranks": "all"}},  # only the engine, as by hand
            torch={"activities": ["cpu"]},
        )

    def contender(self, name: str, around: Callable[[], Any]) -> Callable[[], float]:
        self.generating[name], self.cpu[name] = [], []

        def measured() -> float:
            ms, generating_ms, cpu_ms = self.engine.loop.run_until_complete(self.time(around()))
            self.generating[name].append(generating_ms)
            self.cpu[name].append(cpu_ms)
            self.size[name] = sum(path.stat().st_size for path in self.folder.rglob("*.gz"))
            shutil.rmtree(self.folder, ignore_errors=True)  # a late file may be written now
            self.folder.mkdir(exist_ok=True)
            return float(ms)

        return measured

    async def time(self, around: Any) -> tuple[float, float, float]:
        from tiny_sglang import generate

        began, cpu_began = time.perf_counter(), time.process_time()
        async with around:
            opened, cpu_opened = time.perf_counter(), time.process_time()
            await generate(self.engine, REQUESTS, TOKENS)
            generated, cpu_generated = time.perf_counter(), time.process_time()
        wall = (time.perf_counter() - generated) + (opened - began)
        cpu = (time.process_time() - cpu_generated) + (cpu_opened - cpu_began)
        return wall * 1e3, (generated - opened) * 1e3, cpu * 1e3

    def captured(self) -> Any:
        return capture(next(self.steps), engines=self.engine, config=self.config)

    def not_selected(self) -> Any:
        return capture(next(self.steps) + 1, engines=self.engine, config=self.config)

    def by_hand(self, **options: object) -> Any:
        return ByHand(self.engine, str(self.folder / "hand"), options)

    def alone(self) -> Any:
        return ByHand(None, "", {})


class ByHand:
    """SGLang's start_profile and stop_profile around a block. Without an engine, there are no calls."""

    def __init__(self, engine: Any, folder: str, options: dict[str, object]) -> None:
        self.engine, self.folder, self.options = engine, folder, options

    async def __aenter__(self) -> None:
        if self.engine is not None:
            from sglang.srt.managers.io_struct import ProfileReq

            request = ProfileReq(output_dir=self.folder, **self.options)
            await self.engine.tokenizer_manager.start_profile(request)

    async def __aexit__(self, *error: object) -> None:
        if self.engine is not None:
            await self.engine.tokenizer_manager.stop_profile()


def main() -> None:
    quick = arguments(__doc__).quick
    header("a captured generation of SGLang", "stepscope", "sglang", "torch")
    if find_spec("sglang") is None:
        print(
            "not installed: sglang. `python3 dev.py test --engines sglang-0.5.23` makes .venv-sglang-0.5.23"
        )
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "packages/rollout-sglang/tests"))
    import sglang
    from tiny_sglang import settings, write_model

    folder = Path(tempfile.mkdtemp())
    engine = sglang.Engine(**settings(write_model(folder / "model")))
    try:
        bench = Bench(engine, folder / "out")
        contenders = {
            ALONE: bench.contender(ALONE, bench.alone),
            HAND: bench.contender(HAND, lambda: bench.by_hand(**LIGHT)),
            CAPTURE: bench.contender(CAPTURE, bench.captured),
            OFF: bench.contender(OFF, bench.not_selected),
            DEFAULTS: bench.contender(DEFAULTS, bench.by_hand),
        }
        (folder / "out").mkdir()
        results = interleaved(contenders, 3 if quick else ROUNDS)
    finally:
        engine.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    middle = {name: statistics.median(times) for name, times in results.items()}
    generating = {name: statistics.median(times[1:]) for name, times in bench.generating.items()}
    cpu = {name: statistics.median(times[1:]) for name, times in bench.cpu.items()}
    table(
        [f"{REQUESTS} requests, {TOKENS} passes", "start + stop, ms", "CPU here, ms", "generate, ms", "kB"],
        [
            [
                name,
                f"{middle[name]:.2f}",
                f"{cpu[name]:.1f}",
                f"{generating[name]:.0f}",
                f"{bench.size[name] / 1e3:.0f}",
            ]
            for name in contenders
        ],
    )
    captures_of_an_engine(results, bench.generating, cpu)
    verdict("what SGLang's defaults cost more", middle[DEFAULTS] / middle[CAPTURE], 2, "x", at_least=True)


if __name__ == "__main__":
    main()
