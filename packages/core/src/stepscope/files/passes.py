"""Files of an engine's forward passes, in columns: which pass served which requests. docs/requests.md lists
the columns.

A file is one JSON object, compressed with gzip. The file and its sidecar are beside the engine's traces. It
contains no prompts and no completions.
"""

from __future__ import annotations

import gzip
import zlib
from io import BytesIO
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from stepscope.errors import RecordError
from stepscope.files.clock import ClockAnchor, Int
from stepscope.files.storage import decode, open_file

KIND = "engine_passes"
"""`Artifact.kind` of a file of passes."""
SUFFIX = "_passes.json.gz"
"""End of the file's name."""
MAX_BYTES = 1 << 30
"""The largest file that is read, in uncompressed bytes."""

PassKind: TypeAlias = Literal["prefill", "decode", "mixed", "speculative", "idle"]
"""Work of a forward pass. `prefill` computes prompts, `decode` generates one token for each request, and
`mixed` does both. `speculative` verifies drafted tokens. `idle` serves no request; the engine runs it because
another engine of its data-parallel group has requests."""
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Version: TypeAlias = Int | str | None


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """One row for each request."""

    id: list[str]
    """Id of each request inside the engine."""
    caller_id: list[str | None]
    """Id that the caller gave to the request, or None if the caller uses the engine's id."""
    arrived_ns: list[Number | None]
    """Time at which the engine queued the request, or None if that was before the recording."""
    version_begun: list[Version]
    """Version of the weights at the request's first pass, or None if unknown."""
    version_ended: list[Version]
    """Version of the weights at the request's last pass, or None if unknown."""
    updates_begun: list[Number | None] | None = None
    """Number of weight updates from the engine's start to the request's first pass, or None if updates are
    not counted."""
    updates_ended: list[Number | None] | None = None
    """Number of weight updates from the engine's start to the request's last pass, or None if updates are not
    counted."""


class Passes(msgspec.Struct, frozen=True, kw_only=True):
    """One row for each forward pass, in order."""

    number: list[Number]
    """Number of the pass since the recording began, from 0."""
    begin_ns: list[Number]
    end_ns: list[Number]
    kind: list[PassKind]
    requests: list[Number]
    """Number of requests that the pass served. Each has a row in `served`, in the order of the passes."""
    running: list[Number]
    """Number of requests that were running in the engine, including requests that this pass did not serve."""
    waiting: list[Number]
    """Number of requests in the engine's queue."""
    kv_use: list[float | None]
    """Used fraction of the KV cache, from 0 to 1, or None if unknown."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One row for each request of each pass, in the order of the passes."""

    request: list[Number]
    """Index of the request in `requests`."""
    tokens: list[Number]
    """Number of the request's tokens that the pass computed."""
    output: list[Number]
    """Number of tokens that the pass added to the request's output; 0 for a part of a prompt."""


class Preempted(msgspec.Struct, frozen=True, kw_only=True):
    """One row for each time that a request was preempted and lost its KV cache."""

    number: list[Number]
    """Number of the pass at which the request was preempted."""
    request: list[Number]


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """One row for each update of the weights, and one for the first known version."""

    at_ns: list[Number] = []
    version: list[Version] = []
    """The version of the weights after `at_ns`, or None if unknown."""


class PassFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one file: the passes of one engine in one capture.

    Times are CLOCK_MONOTONIC in ns on the engine's host, as in `spans/*.jsonl`.
    """

    format: Literal[1] = 1
    step: Int
    run_id: str
    replica: Int
    dp: Number = 0
    """Number of the data-parallel engine in its replica."""
    host: str
    anchor: ClockAnchor
    """Clock reading of the engine's host at the start of the recording."""
    closed: ClockAnchor
    """Clock reading of the engine's host at the end of the recording."""
    dropped: Number = 0
    """Number of passes that were not recorded, because there were more than `engine.passes`."""
    requests: Requests
    passes: Passes
    served: Served
    preempted: Preempted
    weights: Weights = Weights()


def read_passes(path: Path) -> PassFile:
    """Read a file of passes.

    Raises:
        OSError: the file cannot be read.
        RecordError: the content is something else, or its columns do not fit together.
    """
    with open_file(path) as file:
        return unpacked(file.read(MAX_BYTES))


def unpacked(content: bytes) -> PassFile:
    """Decode the bytes of a file of passes.

    Raises:
        RecordError: as `read_passes`.
    """
    try:
        with gzip.open(BytesIO(content)) as file:
            data = file.read(MAX_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecordError(f"it is cut off or no gzip: {error}") from None
    if len(data) > MAX_BYTES:
        raise RecordError(f"it holds more than {MAX_BYTES} bytes")
    record = decode(data, PassFile)
    check_passes(record)
    return record


def check_passes(file: PassFile) -> None:
    """Check that the columns of `file` fit together.

    Raises:
        RecordError: columns of a table differ in length, a row names an unknown request, a pass ends before
            it begins, or passes are out of order.
    """
    for table in ("requests", "passes", "served", "preempted", "weights"):
        every = msgspec.structs.asdict(getattr(file, table))
        columns = {name: column for name, column in every.items() if column is not None}
        if len({len(column) for column in columns.values()}) > 1:
            sizes = ", ".join(f"{name} {len(column)}" for name, column in columns.items())
            raise RecordError(f"columns of {table} differ in length: {sizes}")
    passes, rows, known = file.passes, sum(file.passes.requests), len(file.requests.id)
    if rows != len(file.served.request):
        raise RecordError(f"passes.requests sums to {rows}, and served has {len(file.served.request)} rows")
    if any(request >= known for request in (*file.served.request, *file.preempted.request)):
        raise RecordError(f"a row names a request beyond the {known} in requests")
    if any(end < begin for begin, end in zip(passes.begin_ns, passes.end_ns, strict=True)):
        raise RecordError("a pass ends before it begins")
    if any(later < earlier for earlier, later in zip(passes.number, passes.number[1:], strict=False)):
        raise RecordError("passes are not in the order of their numbers")
