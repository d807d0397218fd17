"""The main program of `stepscope demo`: Ray, the trainer, a few steps, and captures of some of them."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepscope import Capture, ProfileConfig, aprepare, capture
from stepscope.config import check_save_path

WARM_UP = 30
"""Supervised updates before the first step: enough to call the calculator, not enough to do so right."""


@dataclass(frozen=True)
class DemoResult:
    save_path: Path
    """Absolute."""
    rewards: tuple[float, ...]
    """Mean reward of each step, between 0 and 1."""
    captured: tuple[int, ...]
    """The steps that were captured."""
    seconds: float
    """Total duration, with the start of Ray."""


def run_demo(
    save_path: Path,
    *,
    steps: int = 4,
    captured: Sequence[int] = (1, 3),
    seed: int = 0,
    engine: str = "torch",
    iterations: int = 200,
    on_progress: Callable[[str], None] = print,
) -> DemoResult:
    """Train for `steps` steps, and profile those in `captured` into `save_path`.

    If Ray does not run in this process, it is started, and shut down at the end on every path.

    Args:
        engine: The engine that generates: `torch`, the demo's own continuous batching, or an installed
            adapter with a replica for the demo (`vllm`, `sglang`). Two of different environments:
            `vllm=/there/bin/python,sglang=/here/bin/python`, each with this Ray and this stepscope.
        iterations: Forward passes of each replica that its profiler records.

    Raises:
        ConfigError: `save_path` cannot be written.
    """
    import ray

    began = time.perf_counter()
    config = profile(save_path.resolve(), [step for step in captured if step < steps], iterations)
    check_save_path(config, on_ray=True)  # before anything is started
    ours = not ray.is_initialized()
    try:
        if ours:
            on_progress("starting Ray on this machine")
            start_ray()
        rewards = asyncio.run(train(config, steps, seed, engine, on_progress))
    finally:
        if ours:
            ray.shutdown()
    selected = tuple(step for step in range(steps) if config.selects(step))
    return DemoResult(Path(config.save_path), tuple(rewards), selected, time.perf_counter() - began)


def profile(save_path: Path, captured: Sequence[int], iterations: int) -> ProfileConfig:
    """Return a configuration for all actors, the reference, and forward passes of each replica."""
    return ProfileConfig(
        save_path=save_path,
        steps=captured,
        roles={
            "actor": {"ranks": "all"},
            "ref": {"ranks": "all"},
            "rollout": {"ranks": "all", "engine": {"iterations": {"count": iterations}}},
        },
        budget={"fanout_seconds": 180},  # SGLang writes 90 MB as it stops, which takes a busy machine 40 s
    )


def start_ray() -> None:
    """Start a Ray of this process alone, without dashboard and usage report. RAY_ADDRESS does not count."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=8,  # counted, not pinned: the actors share all cores
        include_dashboard=False,
        object_store_memory=128 * 1024**2,
        logging_level=logging.ERROR,
        log_to_driver=False,  # a failure of a worker comes back as an exception, or is in the manifest
    )


async def train(
    config: ProfileConfig, steps: int, seed: int, engine: str, on_progress: Callable[[str], None]
) -> list[float]:
    """Run the training loop and return the mean reward of each step."""
    from stepscope_report.demo.calculator import Calculator
    from stepscope_report.demo.trainer import Trainer

    rewards = []
    captures: list[Capture] = []
    async with Calculator() as calculator:
        on_progress(f"placing 2 actor workers, 1 reference worker and 2 rollout replicas ({engine})")
        trainer = Trainer(calculator, seed, config, engine)
        loss = await trainer.set_up(WARM_UP)
        await aprepare(workers=trainer.workers, engines=trainer.engines, config=config)
        on_progress(f"warmed the policy up with {WARM_UP} supervised updates: loss {loss:.2f}")
        for step in range(steps):
            async with capture(step, workers=trainer.workers, engines=trainer.engines, config=config) as cap:
                result = await trainer.step(step)
            on_progress(f"step {step}: {result}{', captured' if cap.selected else ''}")
            rewards.append(result.reward)
            captures.append(cap)
        for cap in captures:
            await asyncio.to_thread(cap.result.wait)  # for the traces, which are written in the background
        await trainer.shut_down()
    return rewards
