"""STEPSCOPE_DISABLE=1: an engine is built as it would be without stepscope."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
from stepscope import ProfileConfig
from stepscope_vllm import engine_args, engine_env, server_args
config = ProfileConfig(save_path="run", steps=[2])
for release in ("0.12.0", "0.32.0"):
    print(engine_args(config, installed=release), engine_env(config, installed=release), server_args(config))
"""


def test_no_argument_and_no_variable_is_added() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "STEPSCOPE_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "{} {} []\n" * 2
