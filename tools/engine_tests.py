"""Tests in other environments than `.venv`: on real engines, newest releases, and every Python here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from tools import processes, repository
from tools.engine_environments import NEWEST, EngineEnvironment, engines, newest_released, unasked
from tools.environments import Environment
from tools.processes import run, run_tests, say, stop


@contextmanager
def engines_beside() -> Iterator[Callable[[], bool]]:
    """Run the tests on real engines in another dev.py during the block, at a low priority.

    Yields a function that waits for this dev.py, shows its output and returns whether the tests passed.
    """
    say("the tests on real engines run meanwhile; their output follows that of the others")
    with tempfile.TemporaryFile() as output, tempfile.NamedTemporaryFile("r") as failed:
        process = subprocess.Popen(
            [sys.executable, str(repository.ROOT / "dev.py"), "test", "--engines", *unasked()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "DEV_FAILED_TESTS": failed.name},
            start_new_session=True,
            preexec_fn=partial(os.nice, 10),
        )

        def passed() -> bool:
            for chunk in written(process, output):
                print(chunk, end="", flush=True)
            processes.FAILED.extend(failed.read().splitlines())
            return process.returncode == 0

        try:
            yield passed
        finally:
            stop(process, partial(os.killpg, process.pid))


def written(process: subprocess.Popen[bytes], output: IO[bytes]) -> Iterator[str]:
    """Yield what `process` writes to the file `output`, from the beginning, until the process ends."""
    at, ended = 0, False
    while not ended:
        try:
            process.wait(1)
            ended = True
        except subprocess.TimeoutExpired:
            pass
        chunk = os.pread(output.fileno(), 1 << 26, at)
        at += len(chunk)
        yield chunk.decode(errors="replace")


def test_engines(arguments: Sequence[str]) -> bool:
    """Run the tests on real engines, each in the environment with the engine.

    Args:
        arguments: Names of environments (without a name, those of `unasked`), and arguments for pytest.
    """
    known = engines()
    names = [name for name in arguments if name in known] or list(unasked())
    options = [word for word in arguments if word not in known]
    failed = [name for name in names if not test_engine(known[name], options)]
    if failed:
        say(f"failed or not set up: {', '.join(failed)} (`dev.py test --no-engines` leaves these out)")
    if "DEV_FAILED_TESTS" in os.environ:  # set by `engines_beside`
        Path(os.environ["DEV_FAILED_TESTS"]).write_text("".join(f"{line}\n" for line in processes.FAILED))
    return not failed


def test_engine(environment: EngineEnvironment, options: Sequence[str]) -> bool:
    try:
        python = environment.ready()
    except SystemExit as reason:  # no network, or no engine for this machine: go on with others
        say(f"NOT RUN: the tests on {environment.recipe.name}. {reason}")
        return False
    failed = ("-o", f"cache_dir={environment.folder / 'pytest'}")  # not the cache of tests that run meanwhile
    command = (python, "-m", "pytest", *map(str, environment.tests), *options, *failed)
    return run_tests(*command, again=command, PYTHONPATH=quick_start())


def test_newest(arguments: Sequence[str]) -> bool:
    """Install newest releases, and run the tests on each.

    Args:
        arguments: Keys of `NEWEST` (without a key, all), and arguments for pytest.
    """
    names = [word for word in arguments if word in NEWEST] or list(NEWEST)
    options = [word for word in arguments if word not in NEWEST]
    good = [name for name in names if test_newest_of(name, options)]
    return good == names


def test_newest_of(name: str, options: Sequence[str]) -> bool:
    environment = newest_released(name)
    environment.stamp.unlink(missing_ok=True)  # there may be a newer release by now
    try:
        python = environment.ready()
    except SystemExit as reason:
        say(f"NOT RUN: the tests on the newest {name}. {reason}")
        return False
    say(f"the newest {environment.distribution} is {environment.version}")
    passed = run(python, "-m", "pytest", *map(str, environment.tests), *options, PYTHONPATH=quick_start())
    if not passed:
        say(f"failed on {environment.distribution} {environment.version}")
    return passed


def quick_start() -> str:
    """Return a PYTHONPATH that begins with `tools/quick_start`, which makes imports of engines cheaper."""
    folder = str(repository.ROOT / "tools" / "quick_start")
    return os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])


def test_on(base: str, arguments: Sequence[str]) -> bool:
    folder = repository.ROOT / f".venv-{python_version(base)}"
    environment = Environment(folder, ("test",), base=base, gigabytes=0.3)
    return run(environment.ready(), "-m", "pytest", "--slow", *arguments)


def other_pythons() -> list[str]:
    """Return one interpreter of each Python version from 3.10 on, found on PATH or in pyenv."""
    pyenv = sorted(map(str, (Path.home() / ".pyenv" / "versions").glob("3.*/bin/python")))
    named = [shutil.which(f"python3.{minor}") for minor in range(10, 20)]
    by_version = {python_version(path): path for path in (*pyenv, *named) if path}
    return [by_version[f"3.{minor}"] for minor in range(10, 20) if f"3.{minor}" in by_version]


def python_version(base: str) -> str:
    """Return `3.<minor>`, or "" if `base` does not run, such as pyenv's shim for a version not selected."""
    show = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([base, "-c", show], capture_output=True, text=True).stdout.strip()
