"""A training step in bf16 with two decorated stages. Each stage is also timed without stepscope."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from stepscope import profile_step
from tools.gpu.device import Device


@dataclass(frozen=True)
class OwnTimes:
    """Times of one run of a stage, taken without stepscope."""

    stage: str
    start_ns: int
    """Unix ns, read while the device is idle."""
    end_ns: int
    device_ms: float
    """Time from the first to the last work on the device, by CUDA events, or by the clock of the CPU."""


class Trainer:
    def __init__(self, device: Device, *, width: int, layers: int, rows: int) -> None:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(layers)
        ]
        self.device = device
        self.model = nn.Sequential(*blocks, nn.Linear(width, width)).to(device.torch, torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.rows = torch.randn(rows, width, device=device.torch, dtype=torch.bfloat16)
        self.own: list[OwnTimes] = []
        """Times of the stages in the latest step."""

    def step(self) -> None:
        self.own.clear()
        self.compute_log_prob()
        self.update_actor()

    @profile_step(role="actor")
    def compute_log_prob(self) -> None:
        with torch.no_grad():
            with self._timed("compute_log_prob"):
                self.loss()

    @profile_step(role="actor")
    def update_actor(self) -> None:
        with self._timed("update_actor"):
            self.optimizer.zero_grad()
            cast("Callable[[], None]", self.loss().backward)()  # torch has no type for this
            self.optimizer.step()

    def loss(self) -> Tensor:
        out: Tensor = self.model(self.rows)
        return out.float().square().mean()

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        self.device.synchronize()
        start_ns = time.time_ns()
        with self.device.timed() as watch:
            yield
        self.device.synchronize()
        self.own.append(OwnTimes(stage, start_ns, time.time_ns(), watch.ms))


def large(device: Device) -> Trainer:
    """Return a trainer that spends its time in large matrix products."""
    return Trainer(device, width=device.size(4096, 64), layers=device.size(8, 4), rows=device.size(8192, 64))


def small(device: Device) -> Trainer:
    """Return a trainer that launches many small kernels."""
    return Trainer(device, width=device.size(512, 64), layers=device.size(48, 6), rows=device.size(512, 64))
