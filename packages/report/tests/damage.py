"""Ways to damage a file: its bytes, the values in it, or what lies in its place."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
from contextlib import closing, suppress
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

OUTSIDE = ("../outside/secret.json", "../../outside/secret.json", "../../../outside/secret.json", "OUTSIDE")
"""Paths that lead out of a run's folder to a file beside it; the last stands for the absolute one."""
SCALARS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**62, 2**63, 2**64, -(2**63), 10**40, 1e308, -1e308, 0.1,
    1e-320, "", "x", "..", ".", "a\0b", "\ud800", "\u202e", "1", "-5", "nan", "A" * 5000, *OUTSIDE, [], {},
    [[]], [None], {"a": 1}, {"": None},
)  # fmt: skip
LUMPS = (
    b"[", b'{"a":', b"\0", b'"', b"\xff\xfe", b"9" * 400, b"1e999", b"[" * 3000, b'{"a":' * 3000, b"NaN",
    b"-", b"\xed\xa0\x80", b"\n", b"&a [*a]", b"!!python/object:os.system ",
)  # fmt: skip

_DEEP = 100


def damage(path: Path, random: Random, outside: Path) -> None:
    """Once. Symbolic links it leaves lead to nothing, to themselves, or to a device."""
    way = random.random()
    if way < 0.6 and path.suffix in (".sqlite", ".db"):
        _damage_rows(path, random)
    elif way < 0.6 and (changed := _with_other_values(_content(path), random, outside)) is not None:
        path.write_bytes(gzip.compress(changed) if path.suffix == ".gz" else changed)
    elif way < 0.92:
        path.write_bytes(_with_other_bytes(path.read_bytes(), random))
    else:
        _put_something_else(path, random)


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError):
        return b""


def _with_other_values(data: bytes, random: Random, outside: Path) -> bytes | None:
    """Return JSON, or lines of JSON, with other values in one document. None if the data is neither."""
    lines = data.split(b"\n") if data.count(b"\n{") else [data]
    place = random.randrange(len(lines))
    if any(_DEEP * opening in lines[place] for opening in (b"[", b'{"a":')):
        return None  # of what was damaged before: Python would give up at a depth that is not always the same
    try:
        value = json.loads(lines[place])
    except ValueError:
        return None
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        value = _with_one_other(value, random, outside)
    lines[place] = json.dumps(value).encode()
    return b"\n".join(lines)


def _with_one_other(value: Any, random: Random, outside: Path) -> Any:
    new = deepcopy(random.choice(SCALARS))  # the next change may be to what this one put there
    new = str(outside) if new == "OUTSIDE" else new
    *above, last = random.choice(list(_places(value)))
    if last is None:
        return new
    at = value
    for key in above[1:]:
        at = at[key]
    way = random.random()
    if way < 0.75:
        at[last] = new
    elif way < 0.9:
        del at[last]
    elif isinstance(at, dict):
        at[str(new)[:50]] = at.pop(last)
    else:
        at.insert(last, new)
    return value


def _places(value: Any, above: tuple[Any, ...] = (None,)) -> Any:
    """(None, key, key, ...) of every value in there, that of the whole being (None,)."""
    yield above
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _places(inner, (*above, key))


def _damage_rows(path: Path, random: Random) -> None:
    fitting = [
        scalar
        for scalar in SCALARS
        if isinstance(scalar, float | str | None) or (isinstance(scalar, int) and abs(scalar) < 2**63)
    ]
    with closing(sqlite3.connect(path)) as database, suppress(sqlite3.Error, UnicodeEncodeError):
        for _ in range(random.choice((1, 2, 6))):
            tables = [
                name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            ]
            table = random.choice(tables)
            columns = [row[1] for row in database.execute("SELECT * FROM pragma_table_info(?)", (table,))]
            column, value = random.choice(columns), random.choice((*fitting, b"\xff\0"))
            run = database.execute
            way = random.random()
            if way < 0.8:
                run(f'UPDATE "{table}" SET "{column}" = ?', (value,))
            elif way < 0.85:
                run(f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO another')
            elif way < 0.95:
                run(f'INSERT INTO "{table}"("{column}") VALUES (?)', (value,))
            else:
                run(f'ALTER TABLE "{table}" RENAME TO "odd; name"')
            database.commit()


def _with_other_bytes(data: bytes, random: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.randrange(len(changed) + 1)
        to = min(len(changed), at + random.choice((1, 2, 8, 100, 1000)))
        way = random.randrange(6)
        if way == 0:
            del changed[at:]
        elif way == 1 and changed:
            changed[at % len(changed)] ^= 1 << random.randrange(8)
        elif way == 2:
            del changed[at:to]
        elif way == 3:
            changed[at:at] = changed[at:to] * random.choice((1, 2, 50))
        elif way == 4:
            changed[at:at] = bytes(random.randrange(256) for _ in range(random.choice((1, 4, 64))))
        else:
            changed[at:at] = random.choice(LUMPS)
    return bytes(changed)


def _put_something_else(path: Path, random: Random) -> None:
    path.unlink()
    way = random.randrange(6)
    if way == 0:
        path.touch()
    elif way == 1:
        path.mkdir()
    elif way == 2:
        path.symlink_to(path.with_name("nothing"))
    elif way == 3:
        path.symlink_to(path)
    elif way == 4:
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
