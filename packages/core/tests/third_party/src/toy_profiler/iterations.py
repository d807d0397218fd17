"""Iterations of the toy engine, by the names of their annotations."""

from __future__ import annotations

import re

from stepscope_report.timeline import Requests


def requests(name: str) -> Requests | None:
    named = re.fullmatch(r"toy pass: (\d+) \+ (\d+)", name)
    return Requests(int(named[1]), int(named[2])) if named else None
