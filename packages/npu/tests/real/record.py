"""A process that captures three steps: `record.py SAVE_PATH`. In the last step, CANN records nothing."""

from __future__ import annotations

import os
import sys

import torch
import torch_npu

from stepscope import ProfileConfig, capture, span


def main(save_path: str) -> None:
    torch_npu.npu.set_device(0)
    for step, export in ((1, "text"), (2, "db"), (3, "text")):
        if step == 3:
            del os.environ["FAKE_CANN_PROF"]
        config = ProfileConfig.from_mapping(
            {
                "tool": "npu",
                "save_path": save_path,
                "steps": [1, 2, 3],
                "npu": {"level": "level1", "export": export},
            }
        )
        with capture(step, config=config) as block:
            with span("update", role="actor"):
                with span("warm_up", role="actor"):
                    torch.ones(256, 256) @ torch.ones(256, 256)
                with span("inner", role="actor"):
                    torch.ones(256, 256) @ torch.ones(256, 256)
        block.result.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
