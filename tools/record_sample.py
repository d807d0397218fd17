"""Record the run that `stepscope report --sample` shows, with the real demo.

    python tools/record_sample.py [FOLDER]

The script needs torch, Ray and a quiet machine, and takes a minute. With FOLDER, it packs a run that the demo
has left there. It replaces this machine's host name and folder, and corrects the file sizes in the records.
Pages, timelines and logs are left out.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope_report.demo import ARCHIVE
from stepscope_report.demo.trainer import run_demo

ITERATIONS = 25
"""Recorded forward passes of each replica. Two hundred would be three quarters of the package's size."""
HOST, FOLDER = "node-a", "/data/demo"
"""The host name and the folder that the sample shows."""
LEFT_OUT = re.compile(r"report\.html|timeline\.json\.gz|control/.*|.*\.log")
MOST = 2_900_000
"""The largest size of the archive in bytes."""


@dataclass(frozen=True)
class Names:
    """The folder and the host name of the machine that recorded the run."""

    folder: str
    host: str

    def replaced(self, text: str) -> str:
        text = text.replace(self.folder, FOLDER)
        return re.sub(rf"(?<![A-Za-z0-9.-]){re.escape(self.host)}(?![A-Za-z0-9.-])", HOST, text)


def main(arguments: list[str]) -> None:
    if arguments:
        pack(Path(arguments[0]).resolve(), ARCHIVE)
        return
    with tempfile.TemporaryDirectory() as folder:
        run_demo(Path(folder).resolve(), iterations=ITERATIONS)
        pack(Path(folder).resolve(), ARCHIVE)


def pack(run: Path, archive: Path) -> None:
    """Write the files of a run into `archive`. The same run always gives the same bytes."""
    record = json.loads((run / "run.json").read_text())
    names = Names(record["config"]["save_path"], record["host"])
    files = with_sizes(dict(sorted(cleaned(run, names))))
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        for path, data in files.items():
            out.writestr(zipfile.ZipInfo(path), data, zipfile.ZIP_DEFLATED, 9)
    size = archive.stat().st_size
    print(f"{archive.name}: {size:,} bytes, {len(files)} files")
    assert size < MOST, f"the sample may have {MOST:,} bytes"


def cleaned(run: Path, names: Names) -> Iterator[tuple[str, bytes]]:
    """Yield the paths and contents of a run's files, with names replaced."""
    for path in (path for path in run.rglob("*") if path.is_file()):
        relative = path.relative_to(run).as_posix()
        if LEFT_OUT.fullmatch(relative) or LEFT_OUT.fullmatch(path.name):
            continue
        data = path.read_bytes()
        if path.suffix == ".gz":
            text = names.replaced(gzip.decompress(data).decode())
            data = gzip.compress(text.encode(), 9, mtime=0)
        else:
            data = names.replaced(data.decode()).encode()
        if relative == "run.json":
            data = with_command(data)
        yield names.replaced(relative), data


def with_command(record: bytes) -> bytes:
    """Return the record of the run with a command that names no path of this machine."""
    return dumped({**json.loads(record), "command": ["record_sample.py"]})


def with_sizes(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files, with the true file sizes in their records."""
    return {
        path: dumped(sized(json.loads(data), path.partition("/")[0], files))
        if path.endswith(".json")
        else data
        for path, data in files.items()
    }


def sized(value: Any, step: str, files: dict[str, bytes]) -> Any:
    """Return a record of `step` with `size_bytes` of each artifact set to the size of its file."""
    if isinstance(value, list):
        return [sized(item, step, files) for item in value]
    if not isinstance(value, dict):
        return value
    record = {name: sized(item, step, files) for name, item in value.items()}
    file = f"{step}/{record.get('path')}"
    return {**record, "size_bytes": len(files[file])} if "size_bytes" in record else record


def dumped(record: Any) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode()


if __name__ == "__main__":
    main(sys.argv[1:])
