"""Runs each file of tests on a real engine in a process of its own, with a limit on its memory.

When a scheduler crashes SGLang kills the process that made it: there, that is the one with the tests of one
file. The limit is there because an engine that is recorded while it spins takes gigabytes within seconds.
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

pytestmark = pytest.mark.needs("sglang")  # not imported: each group has a process that does so
HERE = Path(__file__).parent
_OLDEST_WITH_ALL = (0, 5, 23)
"""The others run what says how an engine of their version behaves."""
_OLDEST_WITH_PASSES = (0, 5, 12)
_LAYOUTS = (0, 5, 20)
"""Run on request: it starts several schedulers."""

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
    # What SGLang warns of while it is imported is not for us to mend. What its processes write is not held
    # back: a scheduler that dies leaves pytest no time to show it.
    options = ["-v", "--capture=sys", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", *options, *(str(HERE / file) for file in files)]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Nothing is compiled here, and making ready for it takes each process of an engine two seconds.
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1"},
        preexec_fn=partial(_limit, files),
        timeout=1100,
    )
    print(done.stdout)
    assert done.returncode == 0, f"{files} on sglang {installed()}: pytest ended with {done.returncode}"


def _limit(files: list[str]) -> None:
    os.setsid()  # what the engine kills when it dies ends here
    if files[0] not in ("engine_ray.py", "engine_unedited.py"):  # Ray reserves more than it uses
        limit_memory()
