"""The command behind `python3 dev.py gpu`. It needs only the standard library. See `--help`."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tools.gpu import wheels
from tools.gpu.page import PRETENDED, keep_small, write_results
from tools.gpu.parts import PARTS, TOTAL_S, run_part
from tools.gpu.results import Result

KEPT = "kept"
LOG = "log.txt"
FIRST_TO_GO = ("timeline.json.gz", "report_run.html", LOG)


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if options.fill_wheels:
        return 0 if wheels.fill(options.fill_wheels, options.python_version) else 1
    run = Run(options.output, pretend=options.pretend)
    with tempfile.TemporaryDirectory(prefix="stepscope-gpu-") as work:
        paths = run.install(options.wheels, Path(work) / "site")
        if paths is None:
            return 1
        for part in PARTS:
            if options.parts and part.name not in options.parts:
                continue
            limit_s = min(part.limit_s, max(0.0, run.until - time.monotonic()))
            run.say(f"{part.name}: {part.title}, at most {limit_s:.0f} s")
            folder = Path(work) / part.name
            result = run_part(
                part, folder, run.output / LOG, until=run.until, pretend=run.pretend, paths=paths
            )
            run.add(result, folder / KEPT)
            if part.name == "machine" and result.failed and not run.pretend:
                run.say(
                    "this Python finds no CUDA device that works. Fix: --pretend runs all of it on the CPU"
                )
                return 1
            shutil.rmtree(folder, ignore_errors=True)
    return run.end()


class Run:
    """The results of the parts so far, shown on the screen and written into the output folder."""

    def __init__(self, output: Path, *, pretend: bool) -> None:
        self.output = output
        self.pretend = pretend
        self.until = time.monotonic() + TOTAL_S
        self.results: list[Result] = []
        self._began = time.monotonic()
        output.mkdir(parents=True, exist_ok=True)
        for name in ("gpu.json", "gpu.md", "report.html", "report.txt", *FIRST_TO_GO):
            (output / name).unlink(missing_ok=True)  # files of an earlier run
        (output / LOG).touch()

    def say(self, text: str) -> None:
        for line in text.splitlines():
            print(f"[{PRETENDED}] {line}" if self.pretend else line, flush=True)

    def install(self, folder: Path | None, target: Path) -> list[str] | None:
        """Install the checkout and the wheels in `folder` into `target`.

        Returns:
            Folders for PYTHONPATH (empty without `folder`), or None if the installation failed.
        """
        if folder is None:
            return []
        self.say(f"installing the checkout from {folder}")
        failure = wheels.install(folder, target)
        if failure is None:
            return [str(target)]
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        self.say(f"{failure}\nFix: `python3 dev.py gpu --fill-wheels {folder} --python-version {version}`")
        return None

    def add(self, result: Result, kept: Path) -> None:
        """Show a result, and write the results so far with the files in the part's folder `kept`."""
        self.results.append(result)
        for check in result.checks:
            word = "agrees" if check.agrees else "DIFFERS"
            self.say(f"  {word}: {check.what}: {check.ours}; {check.source}: {check.theirs}")
        for line in (*map(str, result.goals), *result.notes):
            self.say(f"  {line}")
        if result.error:
            self.say(f"  {result.error}")
        self.say(f"{result.name}: {result.state} after {result.seconds:.0f} s")
        if kept.exists():
            for file in kept.iterdir():
                shutil.copyfile(file, self.output / file.name)
        self.write()

    def write(self) -> None:
        write_results(self.output, self.results, pretend=self.pretend, files=self._files())

    def end(self) -> int:
        """Delete files until the folder is small enough, show the outcome, and return the exit code."""
        for name in keep_small(self.output, FIRST_TO_GO):
            self.say(f"left out of the folder, which would exceed 16 MB: {name}")
        self.write()
        megabytes = sum(file.stat().st_size for file in self.output.iterdir()) / 1e6
        failed = [result.name for result in self.results if result.failed]
        took = f"{time.monotonic() - self._began:.0f} s, {megabytes:.1f} MB in {self.output}"
        self.say(f"FAILED: {', '.join(failed)}; {took}" if failed else f"all parts agree; {took}")
        return 1 if failed or not self.results else 0

    def _files(self) -> list[str]:
        return sorted(file.name for file in self.output.iterdir())


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py gpu", description="Run everything that needs a GPU.")
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="install what torch lacks from this folder"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        default=Path("outputs/gpu"),
        help="gpu.json, gpu.md, report.html",
    )
    parser.add_argument("--pretend", action="store_true", help="run all on the CPU, and say so in each line")
    parser.add_argument("--parts", type=lambda text: text.split(","), help="only these, by commas")
    parser.add_argument("--fill-wheels", type=Path, metavar="DIR", help="download the wheels and end")
    parser.add_argument(
        "--python-version",
        default=f"{sys.version_info.major}.{sys.version_info.minor}",
        help="the Python of the machine with the GPU, such as 3.12",
    )
    options = parser.parse_args(arguments)
    unknown = set(options.parts or ()) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"no part is named {', '.join(sorted(unknown))}; use {', '.join(p.name for p in PARTS)}")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
