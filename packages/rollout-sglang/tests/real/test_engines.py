"""Runs each file of tests on a real engine in a process of its own, with a limit on its memory.

If a scheduler crashes, SGLang kills the process that made the engine, which here runs the tests of one file
only. The memory is limited because an idle engine that polls while it is recorded takes gigabytes in seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from tiny_sglang import limit_memory

from stepscope_sglang._versions import installed

pytestmark = pytest.mark.needs("sglang")  # sglang is not imported here, but in the process of each group
HERE = Path(__file__).parent
_OLDEST_WITH_ALL = (0, 5, 23)
"""First version that runs all files. Older versions run only files that show how their engine behaves."""
_OLDEST_WITH_PASSES = (0, 5, 12)
_LAYOUTS = (0, 5, 20)
"""Version of the tests with several schedulers, which run only on request."""

VERSION = tuple(int(part) for part in (installed() or "0").split(".")[:3])
GROUPS = [["engine_states.py", "engine_table.py"]]
"""Files that share a process and its engine."""
if VERSION >= _OLDEST_WITH_PASSES:
    GROUPS[0].append("engine_passes.py")
if VERSION >= _OLDEST_WITH_ALL:
    GROUPS[0] += ["engine_contract.py", "engine_documented_loop.py"]
    GROUPS += [
        ["engine_server.py"],
        ["engine_decode.py"],
        ["engine_ray.py"],
        ["engine_unedited.py", "engine_example.py"],
    ]
if VERSION == _LAYOUTS:
    GROUPS += [["engine_parallel.py"], ["engine_router.py"]]


@pytest.mark.parametrize("files", GROUPS, ids=lambda files: files[0].removesuffix(".py"))
def test_on_a_real_engine(files: list[str]) -> None:
    # SGLang's warnings at its import are ignored. The output of its processes is not captured, because pytest
    # could not show it after a scheduler has died.
    options = ["-v", "--capture=sys", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", *options, *(str(HERE / file) for file in files)]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Nothing is compiled here, and preparing to compile takes each process of an engine two seconds.
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1"},
        preexec_fn=partial(_limit, files),
        timeout=1100,
    )
    print(done.stdout)
    assert done.returncode == 0, f"{files} on sglang {installed()}: pytest ended with {done.returncode}"


def _limit(files: list[str]) -> None:
    os.setsid()  # a dying engine kills its process group, which must not contain pytest
    if files[0] not in ("engine_ray.py", "engine_unedited.py"):  # Ray reserves more than it uses
        limit_memory()
