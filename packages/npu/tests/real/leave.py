"""A process that opens a capture and exits without closing it: `leave.py SAVE_PATH HOW`."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch_npu

from stepscope import ProfileConfig, capture, span


def main(save_path: str, how: str) -> None:
    torch_npu.npu.set_device(0)
    config = ProfileConfig(tool="npu", save_path=save_path, steps=[2])
    capture(2, config=config).open()
    with span("update", role="actor"):
        torch.ones(8, 8) @ torch.ones(8, 8)
    if how == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "sys.exit":
        sys.exit(3)
    raise ZeroDivisionError(how)


if __name__ == "__main__":
    main(*sys.argv[1:])
