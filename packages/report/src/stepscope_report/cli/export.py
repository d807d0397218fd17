"""`stepscope export` writes a report's tables as Parquet files. `publish` gives the report's figures to other
stores.

The columns follow from the types of the rows, not from their values, so that the files of any two steps have
the same columns. A row within a row becomes a struct. Attributes become JSON text, and values of settings
become text, because they have no single type.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import typer

from stepscope.config import WRITERS
from stepscope.errors import ConfigError, RecordError
from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.storage import temporary
from stepscope_report.cli import screen
from stepscope_report.cli.command import CommandError, Exit
from stepscope_report.cli.find import STEPS_HELP, find_of_run, is_step
from stepscope_report.formatting import count, size
from stepscope_report.opened import ROWS, OpenStep
from stepscope_report.table import Rows, Table
from stepscope_report.writers import ReportWriter, load_writers, outcomes, publish_step


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an export."""

    rows: dict[str, int]
    """Number of rows in the file of each table."""
    left_out: dict[str, str]
    """Reason why a table has no file, by table."""
    unreadable: dict[str, str]
    """Reason why a step could not be read, by its folder."""


def export(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_STEP", help="A run's folder, or one step's.")],
    parquet: Annotated[bool, typer.Option("--parquet", help="As Parquet, the only format.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Where to write. [default: RUN_OR_STEP/tables]"),
    ] = None,
    step: Annotated[str | None, typer.Option(metavar="STEPS", help=STEPS_HELP)] = None,
    run: Annotated[
        str | None, typer.Option(metavar="ID", help="The run's id, where several wrote into one folder.")
    ] = None,
) -> None:
    """Write each table of `stepscope_report.open` as a file. A run's tables have the rows of all steps."""
    if not parquet:
        raise CommandError("export as what? Name the format: --parquet")
    arrow = load_pyarrow()
    os.umask(0o077)  # the exported files are as private as the step's files
    chosen = find_of_run(path, step, run)
    steps = (
        OpenStep(layout.root, run=chosen.run_id) for layout in chosen.steps.values()
    )  # one step at a time
    numbered = not is_step(path)
    target = output or (RunLayout(path).tables if numbered else StepLayout(path).tables)
    with screen.waiting(f"writing tables to {target}"):
        written = write_tables(arrow, target, steps, numbered=numbered)
    _show(target, written)
    raise typer.Exit(Exit.INCOMPLETE if written.unreadable or written.left_out else Exit.OK)


def _show(target: Path, written: Written) -> None:
    for name, rows in written.rows.items():
        file = target / f"{name}.parquet"
        screen.say(f"{file}: {count(rows, 'row')}, {size(file.stat().st_size)}")
    for name, reason in written.left_out.items():
        screen.warn(f"table {name} is left out: {reason}")
    for name, reason in written.unreadable.items():
        screen.warn(f"{name}: {reason}")


def load_pyarrow() -> Any:
    """Return the package `pyarrow`.

    Raises:
        CommandError: `pyarrow` cannot be imported.
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
    """Write all tables of the steps to `folder`. An interrupted write leaves no partial file.

    Args:
        arrow: The package `pyarrow`.
        numbered: True to begin each row with the number of its step.

    Raises:
        RecordError: no step can be read. Files of earlier exports are kept.
        OSError: the folder cannot be written. Files of earlier exports are kept.
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
            _file(folder, name).unlink(missing_ok=True)  # readers would read an old file too
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return written


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.parquet"


def _write(arrow: Any, folder: Path, schemas: dict[str, Any], steps: Iterable[OpenStep]) -> Written:
    """Write the tables with one step at a time in memory."""
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
                except (ValueError, TypeError, OverflowError) as error:  # for example a number beyond 64 bits
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
    """Return a value of a row in the form of its column. In a column of text, other values become JSON."""
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
    """Return Arrow's type for the Python type `kind`: text for a type without an equivalent."""
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


def publish(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_STEP", help="A run's folder, or one step's.")],
    to: Annotated[
        str, typer.Option(metavar="NAMES", help="tensorboard, wandb, mlflow, otel: with commas between.")
    ] = "",
    step: Annotated[str | None, typer.Option(metavar="STEPS", help=STEPS_HELP)] = None,
    run: Annotated[
        str | None, typer.Option(metavar="ID", help="The run's id, where several wrote into one folder.")
    ] = None,
) -> None:
    """Give each step's figures (stages, idle, long tail, own cost) to TensorBoard, W&B, MLflow or OTel."""
    if not to.strip(" ,"):
        raise CommandError(f"publish to what? Name it: --to {','.join(WRITERS)}, or some of these")
    os.umask(0o077)  # files of writers are as private as all files in the run's folder
    try:
        writers = load_writers(to.split(","))
    except ConfigError as error:
        raise ConfigError("--to", error.value, error.allowed, error.fix) from None
    chosen = find_of_run(path, step, run)
    steps = chosen.steps.values()
    save_path = RunLayout(path.parent if is_step(path) else path)
    complete = [_publish(save_path, layout, chosen.run_id, writers) for layout in steps]
    raise typer.Exit(Exit.OK if all(complete) else Exit.INCOMPLETE)


def _publish(
    run: RunLayout, step: StepLayout, run_id: str | None, writers: Mapping[str, ReportWriter]
) -> bool:
    """Publish one step and print the outcomes. Return True if nothing failed."""
    name = step.root.name
    try:
        figures = publish_step(run, step, run_id, writers)
    except RecordError as error:
        screen.warn(f"{name}: {error}")
        return False
    show = screen.warn if any(figures.written.values()) else screen.say
    for line in outcomes(figures):
        show(f"{name}: {line}")
    return not any(figures.written.values())
