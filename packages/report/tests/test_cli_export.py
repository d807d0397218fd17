"""`stepscope export`: tables as Parquet files, read back with pyarrow."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

import stepscope_report
from packages.report.tests.commands import Command
from packages.report.tests.simulated import Rollout
from packages.report.tests.steps import MS
from packages.report.tests.test_cli import a_run
from stepscope.testing.steps import StepFolder
from stepscope_report.cli import run
from stepscope_report.cli.export import write_tables
from stepscope_report.opened import ROWS, OpenStep, _values


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = parquet.read_table(folder / f"{name}.parquet").to_pylist()
    return rows


def as_written(name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of `stepscope_report.open` with lists for tuples, and text for values of several types."""
    rows = json.loads(json.dumps(rows))
    if name == "spans":
        return [{**row, "attrs": json.dumps(row["attrs"], ensure_ascii=False)} for row in rows]
    if name == "advice":
        return [{**row, "settings": [in_words(setting) for setting in row["settings"]]} for row in rows]
    return rows


def in_words(setting: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        if key not in ("present", "suggested") or value is None or isinstance(value, str)
        else json.dumps(value)
        for key, value in setting.items()
    }


def a_long_run(path: Path) -> Path:
    """Write a run whose step has engines and trajectories, and a further step that has neither."""
    Rollout(slots=2).report(path)
    folder = StepFolder(path, step=7, run_id="run1")
    driver = folder.process("trainer", owner=True)
    driver.span("rollout", 0, 8 * MS, role="agent_loop", attrs={"batch": 3, "why": "ü", "share": 0.5})
    driver.close(10 * MS)
    folder.write()
    return path


def test_a_run_has_the_rows_of_all_steps_in_each_file(tmp_path: Path, command: Command) -> None:
    path = a_long_run(tmp_path / "run")
    printed = command("export", path, "--parquet")
    opened = stepscope_report.open(path)
    for name in ROWS:
        rows = opened.table(name)
        assert rows_of(path / "tables", name) == as_written(name, rows)
        row = "row" if len(rows) == 1 else "rows"
        assert f"{name}.parquet: {len(rows)} {row}, " in printed.err
    assert len({row["step"] for row in rows_of(path / "tables", "stages")}) == 2
    assert printed.out == ""
    assert {file.name for file in (path / "tables").iterdir()} == {f"{name}.parquet" for name in ROWS}


def test_steps_and_the_folder_can_be_named(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run")
    command = ["export", str(path), "--parquet", "--step", "4", "--run", "run1"]
    assert run([*command, "-o", str(tmp_path / "a" / "b")]) == 0
    assert [row["step"] for row in rows_of(tmp_path / "a" / "b", "stages")] == [4]
    assert not (path / "tables").exists()


def test_every_table_has_the_type_of_its_rows(tmp_path: Path) -> None:
    step = OpenStep(a_run(tmp_path) / "step_000004")
    assert (*_values(step.report()), "spans") == step.tables == tuple(ROWS)


def test_columns_have_one_type_whatever_a_step_holds(tmp_path: Path) -> None:
    long, short = a_long_run(tmp_path / "long"), a_run(tmp_path / "short")
    for path in (long, short):
        assert run(["export", str(path), "--parquet"]) == 0
    for name in ROWS:
        schema = parquet.read_schema(short / "tables" / f"{name}.parquet")
        assert schema == parquet.read_schema(long / "tables" / f"{name}.parquet")
        assert schema.field("step").type == pyarrow.int64()
        times = [field for field in leaves(schema) if field.name.endswith("_ns")]
        assert {field.type for field in times} <= {pyarrow.int64()}
        assert not [field for field in leaves(schema) if pyarrow.types.is_null(field.type)]
    engines = parquet.read_table(short / "tables" / "engines.parquet")
    assert (engines.num_rows, engines.schema.field("held_ns").type) == (0, pyarrow.int64())


def leaves(parent: Any) -> list[Any]:
    """Return the fields below a schema or a struct, those of structs in lists included."""
    fields: list[Any] = []
    for field in parent:
        kind = field.type.value_type if pyarrow.types.is_list(field.type) else field.type
        fields += leaves(kind) if pyarrow.types.is_struct(kind) else [field.with_type(kind)]
    return fields


def test_files_are_as_private_as_the_run(tmp_path: Path) -> None:
    path = a_run(tmp_path)
    assert run(["export", str(path), "--parquet"]) == 0
    assert {file.stat().st_mode & 0o777 for file in (path / "tables").iterdir()} == {0o600}


def test_a_step_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path, command: Command) -> None:
    path = a_run(tmp_path)
    empty(path / "step_000002")
    assert "step_000002: " in command("export", path, "--parquet", code=3).err
    assert [row["step"] for row in rows_of(path / "tables", "stages")] == [4]


def test_files_of_before_stay_if_no_step_can_be_read(tmp_path: Path) -> None:
    path = a_run(tmp_path)
    assert run(["export", str(path), "--parquet"]) == 0
    before = {file.name: file.read_bytes() for file in (path / "tables").iterdir()}
    for step in ("step_000002", "step_000004"):
        empty(path / step)
    assert run(["export", str(path), "--parquet"]) == 1
    assert {file.name: file.read_bytes() for file in (path / "tables").iterdir()} == before


def empty(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()


def test_a_table_that_does_not_fit_is_left_out_and_named(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = a_run(tmp_path)
    command("export", path, "--parquet")
    table = OpenStep.table

    def with_a_huge_number(step: OpenStep, name: str) -> Any:
        rows = table(step, name)
        if name == "spans":
            rows[0]["turn"] = 1 << 70
        return rows

    monkeypatch.setattr(OpenStep, "table", with_a_huge_number)
    assert re.search("table spans .*: step 2: ", command("export", path, "--parquet", code=3).err)
    assert not (path / "tables" / "spans.parquet").exists()
    assert rows_of(path / "tables", "stages")


def test_an_interrupted_export_leaves_the_files_of_before(tmp_path: Path) -> None:
    path = a_run(tmp_path)
    assert run(["export", str(path), "--parquet"]) == 0
    before = {file.name: file.read_bytes() for file in (path / "tables").iterdir()}

    def steps() -> Any:
        yield OpenStep(path / "step_000004")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tables(pyarrow, path / "tables", steps(), numbered=True)
    assert {file.name: file.read_bytes() for file in (path / "tables").iterdir()} == before


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, command: Command) -> None:
    path = a_run(tmp_path)
    (path / "tables").write_text("a file")
    assert f"{path / 'tables'}: File exists" in command("export", path, "--parquet", code=1).err


def test_the_format_is_named(tmp_path: Path, command: Command) -> None:
    assert "--parquet" in command("export", a_run(tmp_path), code=2).err


def test_without_pyarrow_the_command_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    path = a_run(tmp_path)
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "'stepscope[cli,parquet]'" in command("export", path, "--parquet", code=2).err
    assert not (path / "tables").exists()


def test_a_step_has_its_own_files(tmp_path: Path) -> None:
    a_run(tmp_path)
    folder = tmp_path / "step_000004"
    assert run(["export", str(folder), "--parquet", "-q"]) == 0
    step = stepscope_report.open(folder)
    for name in ROWS:
        assert rows_of(folder / "tables", name) == as_written(name, step.table(name))
    assert run(["ls", str(folder)]) == 0
