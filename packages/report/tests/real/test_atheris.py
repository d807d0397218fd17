"""Coverage-guided fuzzing of everything that reads files: `FUZZ_SECONDS` for each reader, 85 by default."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]  # has an environment of its own
import pytest

from packages.report.tests.fuzz_readers import NAMES

SECONDS = int(os.environ.get("FUZZ_SECONDS", "85"))


@pytest.mark.parametrize("target", NAMES)
def test_no_input_that_reaches_new_code_is_an_error_that_nobody_expects(target: str, tmp_path: Path) -> None:
    assert atheris.__file__
    root = Path(__file__).parents[4]
    command = [sys.executable, "packages/report/tests/fuzz_readers.py", target]
    options = [f"-max_total_time={SECONDS}", f"-artifact_prefix={tmp_path}/"]
    done = subprocess.run(
        [*command, *options],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0, done.stderr[-6000:]
    (runs,) = re.findall(r"Done (\d+) runs", done.stderr)
    print(f"{target}: {runs} inputs in {SECONDS} s")  # the depth, which -rP shows
