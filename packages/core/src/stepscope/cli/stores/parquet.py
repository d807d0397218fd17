"""Tables of steps as Parquet files, one per table.

Columns follow the types of the rows, not the values, so that the files of any two steps have the same ones.
Rows within a row are structs. Text holds what has no single type: attributes as JSON, values of settings.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from stepscope.cli.exits import CommandError
from stepscope.errors import RecordError
from stepscope.files.storage.temporary import temporary
from stepscope.report.opened.runs import ROWS, OpenStep
from stepscope.report.table import Rows, Table


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of an export."""

    rows: dict[str, int]
    """Table -> rows in its file."""
    left_out: dict[str, str]
    """Table without a file -> the reason."""
    unreadable: dict[str, str]
    """Step's folder -> the reason."""


def load_pyarrow() -> Any:
    """Return the package `pyarrow`.

    Raises:
        CommandError: it cannot be imported.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise CommandError(
            f"stepscope export --parquet needs pyarrow, which cannot be imported ({error}). "
            "Fix: pip install 'stepscope[cli,parquet]'"
        ) from error
    return pyarrow


def write_tables(arrow: Any, folder: Path, steps: Iterable[OpenStep], *, numbered: bool) -> Written:
    """Write all tables of the steps to `folder`, each file complete or not at all.

    Args:
        arrow: The package `pyarrow`.
        numbered: Whether rows begin with the number of their step.

    Raises:
        RecordError: no step can be read. Files of before stay.
        OSError: the folder cannot be written. Files of before stay.
    """
    schemas = {name: _schema(arrow, row, numbered=numbered) for name, row in ROWS.items()}
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = temporary(folder / "tables")
    unfinished.mkdir()
    try:
        written = _write(arrow, unfinished, schemas, steps)
        for name in written.rows:
            os.replace(_file(unfinished, name), _file(folder, name))
        for name in written.left_out:
            _file(folder, name).unlink(missing_ok=True)  # of before: it would pass for this export's
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return written


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.parquet"


def _write(arrow: Any, folder: Path, schemas: dict[str, Any], steps: Iterable[OpenStep]) -> Written:
    """Write step by step, so that one step at a time is in memory."""
    rows, left_out, unreadable = dict.fromkeys(schemas, 0), dict[str, str](), dict[str, str]()
    readable = False
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(
                arrow.parquet.ParquetWriter(_file(folder, name), schema, compression="zstd")
            )
            for name, schema in schemas.items()
        }
        for step in steps:
            try:
                number = step.report().step
            except RecordError as error:
                unreadable[step.folder.name] = str(error)
                continue
            readable = True
            for name in schemas.keys() - left_out.keys():
                content = step.table(name)
                try:
                    files[name].write_table(_columns(arrow, schemas[name], content, number))
                except (ValueError, TypeError, OverflowError) as error:  # a number beyond 64 bits, say
                    left_out[name] = f"step {number}: {error}"
                rows[name] += len(content)
    if not readable:
        raise RecordError("\n".join(unreadable.values()))
    kept = {name: number for name, number in rows.items() if name not in left_out}
    return Written(rows=kept, left_out=left_out, unreadable=unreadable)


def _columns(arrow: Any, schema: Any, rows: Rows, number: int) -> Any:
    arrays = []
    for name, kind in zip(schema.names, schema.types, strict=True):
        values = [number] * len(rows) if name == "step" else [_value(row[name], kind) for row in rows]
        arrays.append(arrow.array(values, kind))
    return arrow.Table.from_arrays(arrays, schema=schema)


def _value(value: Any, kind: Any) -> Any:
    """Return a value of a row as its column takes it: text in place of what has no single type."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, dict) and kind.num_fields:
        return {field.name: _value(value[field.name], field.type) for field in kind}
    if isinstance(value, list | tuple):
        return [_value(item, kind.value_type) for item in value]
    return json.dumps(value, ensure_ascii=False) if str(kind) == "string" else value


def _schema(arrow: Any, row: type[msgspec.Struct], *, numbered: bool) -> Any:
    first = [arrow.field("step", arrow.int64())] if numbered else []
    return arrow.schema([*first, *_fields(arrow, row)])


def _fields(arrow: Any, row: type[msgspec.Struct]) -> list[Any]:
    return [arrow.field(name, _type(arrow, kind)) for name, kind in get_type_hints(row).items()]


def _type(arrow: Any, kind: Any) -> Any:
    """Return the type of a column whose values are of the type `kind`, or None."""
    plain = {int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_()}
    if kind in plain:
        return plain[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return arrow.struct(_fields(arrow, kind))
    origin, inner = get_origin(kind), [item for item in get_args(kind) if item not in (NoneType, Ellipsis)]
    if origin in (tuple, list, Table) and len(inner) == 1:
        return arrow.list_(_type(arrow, inner[0]))
    if NoneType in get_args(kind) and len(inner) == 1:
        return _type(arrow, inner[0])
    return arrow.string()
