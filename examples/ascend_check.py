"""Check `tool: npu` on a machine with NPUs (not run so far). ascend_check.sh names the expected output.

python examples/ascend_check.py window     two captured steps of matrix products (torchrun: all-reduces too)
python examples/ascend_check.py threads    the same steps on a thread other than the main thread
python examples/ascend_check.py cost       the time of a captured step at each level, and of a step without
python examples/ascend_check.py hold       a capture that stays open until you end the process
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable

import torch
import torch_npu

from stepscope import ProfileConfig, capture, profile_step

LEVELS = (None, "level_none", "level0", "level1", "level2")


class Trainer:
    """Matrix products on one device. Under `torchrun`, all-reduces between the ranks follow."""

    def __init__(self, device: str, size: int) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = f"npu:{os.environ.get('LOCAL_RANK', '0')}" if device == "npu" else device
        if device == "npu":
            torch_npu.npu.set_device(self.device)
        self.reduces = "WORLD_SIZE" in os.environ
        if self.reduces:
            torch.distributed.init_process_group("hccl" if device == "npu" else "gloo")
        self.weights = torch.randn(size, size, device=self.device)

    @profile_step(role="actor")
    def update(self) -> None:
        for _ in range(20):
            product = self.weights @ self.weights
            if self.reduces:
                torch.distributed.all_reduce(product)
        if self.device != "cpu":
            torch_npu.npu.synchronize()


def window(trainer: Trainer, config: ProfileConfig) -> None:
    for step in range(2):
        with capture(step, config=config) as block:
            trainer.update()
        block.result.wait()
        if trainer.reduces:
            torch.distributed.barrier()  # a step is complete when all ranks have written their parts
        block.result.raise_for_missing()
    if trainer.reduces:
        torch.distributed.destroy_process_group()


def threads(trainer: Trainer, config: ProfileConfig) -> None:
    config = config.replace(mode="discrete")
    for step in range(2):
        with capture(step, config=config) as block:
            thread = threading.Thread(target=trainer.update, name="worker")
            thread.start()
            thread.join()
        block.result.wait()
        block.result.raise_for_missing()


def cost(trainer: Trainer, config: ProfileConfig) -> None:
    times: dict[str | None, list[float]] = {level: [] for level in LEVELS}
    trainer.update()  # warm-up, such as compiling
    for round_ in range(3):
        for number, level in enumerate(LEVELS):
            step = round_ * len(LEVELS) + number
            npu = config.npu.replace(level=level or "level0")
            chosen = config.replace(npu=npu, steps=[10**6 if level is None else step])
            with capture(step, config=chosen) as block:
                for _ in range(20):
                    began = time.perf_counter()
                    trainer.update()
                    times[level].append(time.perf_counter() - began)
            if level is not None:
                block.result.wait()
    for level, taken in times.items():
        print(f"{level or 'no capture':12} {1000 * statistics.median(taken):10.3f} ms a step (median of 60)")


def hold(trainer: Trainer, config: ProfileConfig) -> None:
    capture(0, config=config).open()
    print("open", flush=True)
    while True:
        trainer.update()


COMMANDS: dict[str, Callable[[Trainer, ProfileConfig], None]] = {
    function.__name__: function for function in (window, threads, cost, hold)
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs tool: npu on a machine with NPUs.")
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--device", default="npu", choices=("npu", "cpu"))
    parser.add_argument("--size", type=int, default=4096, help="of the matrices")
    parser.add_argument("--level", default="level1")
    parser.add_argument("--export", default="text")
    parser.add_argument("--save-path", default="outputs/ascend_check")
    given = parser.parse_args()
    config = ProfileConfig.from_mapping(
        {
            "tool": "npu",
            "save_path": given.save_path,
            "steps": [0, 1],
            "roles": {"*": {"ranks": "all"}},
            "npu": {"level": given.level, "export": given.export},
        }
    )
    COMMANDS[given.command](Trainer(given.device, given.size), config)


if __name__ == "__main__":
    main()
