"""Feeds one reader with files that atheris makes, guided by what of its code they reach.

python packages/report/tests/fuzz_readers.py TARGET [libFuzzer options] [CORPUS]

An exception that its caller does not expect is a crash; libFuzzer leaves the input beside it as `crash-...`.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from stepscope.files.layout import sidecar_of


def _targets(atheris: Any, folder: Path) -> dict[str, Callable[[bytes], object]]:
    """{name: what reads the bytes}. Imported here: what is to guide is instrumented while it is imported."""
    with atheris.instrument_imports(include=["stepscope", "yaml", "msgspec"]):
        from stepscope.config import ProfileConfig
        from stepscope.errors import ConfigError, RecordError
        from stepscope.files.manifest import Manifest, ProcessPart
        from stepscope.files.requests import Listening, read_requests
        from stepscope.files.run import RunRecord
        from stepscope.files.sidecar import Sidecar
        from stepscope.files.steps import read_uncaptured
        from stepscope.files.storage import read_record
        from stepscope_report.timeline import load_step, merge_step
        from stepscope_report.timeline.readers.chrome import ChromeTrace
        from stepscope_report.timeline.readers.contract import FoundFile, Notes
        from stepscope_report.timeline.readers.nsys import NsysReader
        from stepscope_report.timeline.sources import read_spans

    def spans(data: bytes) -> None:
        read_spans(_put(folder / "a.jsonl", data))

    def records(data: bytes) -> None:
        path = _put(folder / "a.json", data)
        for kind in (Sidecar, ProcessPart, Manifest, RunRecord, Listening):
            with suppress(RecordError):
                read_record(path, kind)
        with suppress(RecordError):
            read_requests(path)
        read_uncaptured(path)

    def config(data: bytes) -> None:
        with suppress(ConfigError):
            ProfileConfig.from_file(_put(folder / "a.yaml", data))

    def kineto(data: bytes) -> None:
        trace = ChromeTrace(_put(folder / "a.json", data))
        trace.fields()
        deque(trace.texts(bytes), maxlen=0)

    def gzipped(data: bytes) -> None:
        """Half of them whole members around what is made, half as they are."""
        whole = gzip.compress(data[1:], 1) if data[:1] < b"\x80" else data[1:]
        trace = ChromeTrace(_put(folder / "a.json.gz", whole))
        deque(trace.texts(bytes), maxlen=0)

    def nsys(data: bytes) -> None:
        file = FoundFile(path=_put(folder / "a.sqlite", data), name="traces/a.sqlite")
        reader = NsysReader()
        if reader.claims(file) is not None:
            with suppress(RecordError):
                recording = reader.open(file, Notes())
                try:
                    deque(recording.events(), maxlen=0)
                finally:
                    recording.close()

    step = folder / "run" / "step_000002"

    def merge(data: bytes) -> None:
        """A whole step, one of whose traces or span files is the input."""
        traces = sorted(path for path in step.glob("traces/*/*") if sidecar_of(path).exists())
        files = [*traces, *sorted(step.glob("spans/*"))]
        target = files[data[0] % len(files)] if data else files[0]
        standing = target.read_bytes()
        try:
            target.write_bytes(data[1:])
            with suppress(RecordError):
                load_step(step)
                merge_step(step)
        finally:
            target.write_bytes(standing)

    return {
        "spans": spans, "records": records, "config": config, "kineto": kineto, "gzip": gzipped,
        "nsys": nsys, "merge": merge,
    }  # fmt: skip


NAMES = ("spans", "records", "config", "kineto", "gzip", "nsys", "merge")
OF = {
    "spans": ("spans/*.jsonl",), "records": ("processes/*.json", "traces/*/*.meta.json", "../*.json"),
    "config": ("../*.yaml",), "kineto": ("traces/*/*.json",), "gzip": ("traces/*/*.gz",),
    "nsys": ("traces/*/*.sqlite",), "merge": ("traces/*/*.json", "spans/*.jsonl"),
}  # fmt: skip
"""Files of a whole step that a target begins with."""


def _put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def seeds(target: str, run: Path) -> Iterator[bytes]:
    for pattern in OF[target]:
        for path in sorted((run / "step_000002").glob(pattern)):
            prefix = b"\x80" if target == "gzip" else b"\0" if target == "merge" else b""
            yield prefix + path.read_bytes()


def main(words: list[str]) -> None:
    atheris: Any = import_module("atheris")
    name, *options = words
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as made:
        folder = Path(made)
        test = _targets(atheris, folder)[name]
        from packages.report.tests.whole_run import write_whole_run

        run = write_whole_run(folder / "run")
        corpus = folder / "corpus"
        corpus.mkdir()
        for number, seed in enumerate(seeds(name, run)):
            (corpus / str(number)).write_bytes(seed)
        atheris.Setup(
            [sys.argv[0], *options, "-max_len=20000", "-timeout=30", str(corpus)], partial(_one, test)
        )
        try:
            atheris.Fuzz()
        finally:
            shutil.rmtree(corpus, ignore_errors=True)


def _one(test: Callable[[bytes], object], data: bytes) -> None:
    test(data)


if __name__ == "__main__":
    main(sys.argv[1:])
