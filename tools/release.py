"""Build the files of a release, check them, and try them in fresh environments: `python3 dev.py release`.

    release.py [--only EXTRAS ...] [--python PYTHON]

The script writes only into `dist/`, and uploads nothing. It imports only the standard library; it runs build
and twine from the environment that dev.py makes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path

from tools.repository import PACKAGES

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
TOGETHER = (("cli", "ray"),)
"""Combinations of extras to try, besides each extra alone and no extra."""
MOST_BYTES = 3_500_000
"""The largest allowed size of a file."""


@dataclass(frozen=True)
class Wheel:
    """A built wheel."""

    path: Path

    @property
    def metadata(self) -> Message:
        with zipfile.ZipFile(self.path) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            return Parser().parsestr(archive.read(name).decode())

    @property
    def constraint(self) -> str:
        """The constraint that makes pip install this file for each requirement of its name."""
        return f"{self.metadata['Name']} @ {self.path.as_uri()}"


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    wheels = build()
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(DIST.iterdir())))
    large = [file.name for file in DIST.iterdir() if file.stat().st_size > MOST_BYTES]
    if large:
        sys.exit(f"larger than {MOST_BYTES:,} bytes: {', '.join(large)}. Fix: see what is in it")
    asked = [tuple(words.split(",")) for words in options.only] or combinations(wheels[0])
    failed = [extras for extras in asked if not tried(extras, wheels, options.python)]
    if failed:
        print(f"\nFAILED: {', '.join(map(named, failed))}. Nothing is to be uploaded.")
        return 1
    print("\nOnly these were tried." if options.only else instructions(wheels))
    return 0


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py release")
    parser.add_argument("--only", nargs="+", default=[], help="extras to try, such as cli or cli,ray")
    parser.add_argument("--python", default=base_python(), help="the Python of the fresh environments")
    return parser.parse_args(arguments)


def base_python() -> str:
    return str(getattr(sys, "_base_executable", sys.executable))


def build() -> list[Wheel]:
    """Build the sdists, and the wheels from the sdists. A file absent in an sdist is then absent in both."""
    shutil.rmtree(DIST, ignore_errors=True)
    for name in PACKAGES:
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(DIST)]
        run(*command, str(ROOT / "packages" / name))
    built = {wheel.metadata["Name"]: wheel for wheel in map(Wheel, DIST.glob("*.whl"))}
    assert len(built) == len(PACKAGES) == len(list(DIST.glob("*.tar.gz")))
    return [built.pop("stepscope"), *(built[name] for name in sorted(built))]


def combinations(core: Wheel) -> list[tuple[str, ...]]:
    """Return the combinations of extras to try: none, each extra alone, and `TOGETHER`."""
    alone = [(extra,) for extra in core.metadata.get_all("Provides-Extra", [])]
    return [(), *alone, *TOGETHER]


def tried(extras: tuple[str, ...], wheels: list[Wheel], python: str) -> bool:
    """Install stepscope with these extras in a fresh environment. Return whether `tools/smoke.py` passes."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stepscope-release-") as name:
        folder = Path(name)
        steps = (
            [python, "-m", "venv", "--without-pip", str(folder / "venv")],
            installation(extras, wheels, folder),
            [str(folder / "venv/bin/python"), "-I", str(ROOT / "tools/smoke.py"), str(folder), *extras],
        )
        output = next((text for text in map(output_of_failure, steps) if text), "")
    outcome, seconds = "FAILED" if output else "ok", time.monotonic() - started
    print(f"{outcome:6}  {named(extras):28} {seconds:4.0f} s", flush=True)
    if output:
        print(output, flush=True)
    return not output


def installation(extras: tuple[str, ...], wheels: list[Wheel], folder: Path) -> list[str]:
    """Return the command that installs the built wheels, with their dependencies from the index."""
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{wheel.constraint}\n" for wheel in wheels))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "venv/bin/python"), "install", "--quiet"]
    return [
        *pip,
        "--disable-pip-version-check",
        "--no-compile",
        "--constraint",
        str(constraints),
        named(extras),
    ]


def named(extras: tuple[str, ...]) -> str:
    return f"stepscope[{','.join(extras)}]" if extras else "stepscope"


def output_of_failure(command: list[str]) -> str:
    """Run a command outside of the checkout. Return its output if it fails, else ""."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        outcome = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True)
    text = f"$ {' '.join(command)}\n{outcome.stdout}{outcome.stderr}(exited with {outcome.returncode})"
    return text if outcome.returncode else ""


def run(*command: str) -> None:
    """Run a command on this terminal, and exit if the command fails."""
    print("$ " + " ".join(word.replace(f"{ROOT}/", "").replace(sys.executable, "python") for word in command))
    if subprocess.run(command, cwd=ROOT).returncode:
        sys.exit("that failed. Nothing is to be uploaded.")


def instructions(wheels: list[Wheel]) -> str:
    """Return a text that says which files to upload, in which order and how."""
    version = wheels[0].metadata["Version"]
    lines = ["", f"All of {version} works. Upload each line once the one before is on the index:", ""]
    for wheel in wheels:
        stem = wheel.path.name.partition("-")[0]
        files = sorted(path for path in DIST.iterdir() if path.name.startswith(f"{stem}-"))
        sizes = ", ".join(f"{path.stat().st_size / 1e6:.2f} MB" for path in files)
        lines.append(f"  twine upload {' '.join(str(path.relative_to(ROOT)) for path in files)}    # {sizes}")
    lines += ["", f"  git tag v{version} && git push origin v{version}", ""]
    [home] = [url for url in wheels[0].metadata.get_all("Project-URL", []) if url.startswith("Homepage")]
    lines.append(
        f"The packages send their readers to {home.partition(', ')[2]}. Make sure that it is the project's."
    )
    lines.append("twine asks for a token of the index, or reads TWINE_PASSWORD. To rehearse:")
    lines.append("  twine upload --repository testpypi dist/*")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
