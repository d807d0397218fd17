"""A training run that selects no step to capture: `live.py SAVE_PATH`.

It prints the number of each step, and waits for a line on stdin before the step begins.
"""

from __future__ import annotations

import sys

import torch
import torch_npu

from stepscope import ProfileConfig, capture, span

STEPS = 3


def main(save_path: str) -> None:
    torch_npu.npu.set_device(0)
    config = ProfileConfig.from_mapping({"tool": "npu", "save_path": save_path, "steps": [1000]})
    for step in range(STEPS):
        print(f"step {step}", flush=True)
        sys.stdin.readline()
        with capture(step, config=config) as block:
            with span("update", role="actor"):
                torch.ones(8, 8) @ torch.ones(8, 8)
        block.result.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
