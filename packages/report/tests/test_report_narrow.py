"""Tables in narrow terminals."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from stepscope_report.terminal.layout import table

COLUMNS = ("process", "device", ">recorded", ">busy", ">compute", ">exposed communication", ">copies")
ROWS = [
    ("trainer", "GPU 0", "49.8 ms", "45.6 ms 91.6 %", "45.4 ms 91.2 %", "13.7 ms 27.5 %", "215 us 0.4 %"),
    ("rollout 12", "GPU 3", "1,204 ms", "17.1 ms 1.4 %", "16.9 ms 1.4 %", "0 0.0 %", "98.3 us 0.0 %"),
]


def lines(width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(table("Devices", COLUMNS, ROWS, "A note."))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [30, 45, *range(60, 112), 200])
def test_nothing_of_a_table_is_cut(width: int) -> None:
    drawn = lines(width)
    assert max(map(len, drawn)) <= width
    shown, cells = "".join(drawn), "".join(cell for row in (COLUMNS, *ROWS) for cell in row)
    for character in set(cells) - set(" >"):
        assert shown.count(character) >= cells.count(character), character


def test_a_wide_terminal_shows_a_row_in_one_line() -> None:
    assert any(all(cell in line for cell in ROWS[0]) for line in lines(110))


def test_shares_stand_below_their_times_at_80_columns() -> None:
    drawn = lines(80)
    (at,) = (at for at, line in enumerate(drawn) if "trainer" in line)
    assert [part for part in ("45.6 ms", "45.4 ms", "13.7 ms", "215 us") if part in drawn[at]] == [
        "45.6 ms", "45.4 ms", "13.7 ms", "215 us",
    ]  # fmt: skip
    assert drawn[at + 1].split() == ["91.6", "%", "91.2", "%", "27.5", "%", "0.4", "%"]


def test_words_of_texts_stay_whole_where_there_is_room() -> None:
    columns = ("stage", ">on the path", ">%", ">with below", ">could save", "process", "longest in")
    stage = ("ref compute_ref_log_prob", "251 ms", "9.6", "437 ms", "65.0 ms", "ref 0", "problem15-1 turn 3")
    wait = ("rollout queue (waiting)", "1.20 ms", "0.1", "", "", "agent_loop replica 12", "")
    out = io.StringIO()
    Console(file=out, width=100).print(table("Critical path", columns, [stage, wait]))
    for word in (*stage[0].split(), *wait[-2].split(), *stage[-1].split()):
        assert word in out.getvalue()
