"""Collectives of torch.distributed in this process: pending calls, and the number of calls in each group.

Both are read from torch's own flight recorders, which are on if TORCH_FR_BUFFER_SIZE (formerly
TORCH_NCCL_TRACE_BUFFER_SIZE) is not 0. NCCL has one, and in newer versions of torch, gloo has one too.
Without them, the numbers are read from the process groups, and pending calls from spans.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from stepscope._recording.spans.span import Span
from stepscope.files.spans import GROUP, SEQUENCE
from stepscope.files.states import Collectives, PendingCollective, ProcessGroup

_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions of `torch._C._distributed_c10d` that dump the flight recorders of NCCL and of other backends."""
_COMPLETED = "completed"


class _Entry(msgspec.Struct):
    """One call in a dump of torch's flight recorder (`FlightRecorder.hpp`)."""

    process_group: tuple[str, str]
    profiling_name: str
    collective_seq_id: int
    state: str
    time_created_ns: int
    is_p2p: bool = False
    retired: bool = False


class _Status(msgspec.Struct):
    last_enqueued_collective: int = -1


class _Group(msgspec.Struct):
    desc: str = ""
    ranks: str = ""


class Dump(msgspec.Struct):
    """A dump of torch's flight recorder, without fields that are not used."""

    entries: list[_Entry] = []
    pg_config: dict[str, _Group] = {}
    pg_status: dict[str, _Status] = {}


def collectives_here(spans: Sequence[Span]) -> Collectives | None:
    """Return the process groups and pending collectives of this process, or None if it does not use
    torch.distributed.

    Args:
        spans: Spans of collectives that have not ended.

    Raises:
        Exception: torch's flight recorder has another format.
    """
    torch: Any = sys.modules.get("torch.distributed")
    if torch is None or not torch.is_available() or not torch.is_initialized():
        return None
    binding = sys.modules["torch"]._C._distributed_c10d
    dumps = [getattr(binding, name) for name in _DUMPS if hasattr(binding, name)]
    texts = [dump(includeCollectives=True, onlyActive=True) for dump in dumps]
    ranks = _ranks_of_groups(torch)
    return joined([parsed(text) for text in texts], torch.get_rank(), ranks) or _counted(torch, ranks, spans)


def _counted(torch: Any, ranks: dict[str, tuple[int, ...]], spans: Sequence[Span]) -> Collectives:
    """Return the process groups and pending collectives without torch's flight recorders. Process groups
    count their calls, and `spans` are the pending calls.
    """
    names: dict[Any, str] = dict(getattr(torch.distributed_c10d._world, "pg_names", {}))
    words = {
        str(name): _described(getattr(group, "group_desc", ""), str(name)) for group, name in names.items()
    }
    groups = []
    for group, name in names.items():
        with suppress(RuntimeError):  # older versions of gloo raise before the first call
            begun = group._get_sequence_number_for_group()
            own = ProcessGroup(
                name=str(name), description=words[str(name)], ranks=ranks[str(name)], entered=begun
            )
            groups.append(own)
    now_ns = time.monotonic_ns()
    pending = []
    for span in spans:
        attrs = span.attrs or {}
        group, number = str(attrs.get(GROUP)), attrs.get(SEQUENCE)
        pending.append(
            PendingCollective(
                group=group,
                description=words.get(group, group),
                number=number if isinstance(number, int) else None,
                op=span.stage,
                state="started",
                age_ns=max(0, now_ns - span.start_ns),
            )
        )
    pending.sort(key=lambda call: -call.age_ns)
    return Collectives(rank=torch.get_rank(), groups=tuple(groups), pending=tuple(pending))


def parsed(text: str | bytes) -> Dump:
    """Decode a dump from JSON. torch writes some numbers as text."""
    return msgspec.json.decode(text, type=Dump, strict=False)


def joined(dumps: list[Dump], rank: int, ranks: dict[str, tuple[int, ...]]) -> Collectives | None:
    """Combine the dumps of one process.

    Args:
        ranks: {process group: its global ranks}, for groups whose ranks are not in a dump.
    """
    groups = tuple(group for dump in dumps for group in _groups(dump, ranks))
    pending = [call for dump in dumps for call in _pending(dump)]
    if not groups and not pending:
        return None
    return Collectives(
        rank=rank, groups=groups, pending=tuple(sorted(pending, key=lambda call: -call.age_ns))
    )


def _groups(dump: Dump, ranks: dict[str, tuple[int, ...]]) -> Iterator[ProcessGroup]:
    for name, status in dump.pg_status.items():
        config = dump.pg_config.get(name, _Group())
        yield ProcessGroup(
            name=name,
            description=_described(config.desc, name),
            ranks=_numbers(config.ranks) or ranks.get(name, ()),
            entered=status.last_enqueued_collective,
        )


def _pending(dump: Dump) -> Iterator[PendingCollective]:
    now_ns = time.time_ns()
    for entry in dump.entries:
        if entry.retired or entry.state == _COMPLETED:
            continue
        name, description = entry.process_group
        yield PendingCollective(
            group=name,
            description=_described(description, name),
            number=None if entry.is_p2p else entry.collective_seq_id,
            op=entry.profiling_name.partition(":")[2] or entry.profiling_name,
            state=entry.state,
            age_ns=max(0, now_ns - entry.time_created_ns),
        )


def _described(description: str, name: str) -> str:
    return name if description in ("", "undefined") else description


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers in a text such as `[0, 1]`."""
    with suppress(msgspec.DecodeError):
        return tuple(msgspec.json.decode(text or "[]", type=list[int]))
    return ()


def _ranks_of_groups(torch: Any) -> dict[str, tuple[int, ...]]:
    """Return {process group: its global ranks} from torch's Python code, because gloo's flight recorder lacks
    them.
    """
    world = getattr(torch.distributed_c10d, "_world", None)
    names = dict(getattr(world, "pg_names", {}))
    ranks = dict(getattr(world, "pg_group_ranks", {}))
    return {str(name): tuple(ranks.get(group, ())) for group, name in names.items()}
