"""Writers that are there, by name: ours, and those of other packages through entry points."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from stepscope.config import WRITERS
from stepscope.config._words import closest
from stepscope.errors import ConfigError
from stepscope.writers.protocol import ReportWriter

GROUP = "stepscope.writers"


def load_writer(name: str) -> ReportWriter:
    """Return the writer of that name.

    Raises:
        ConfigError: no writer has that name, or a package that it needs is not installed.
    """
    try:
        if name in WRITERS:
            return cast(ReportWriter, import_module(f"stepscope.writers.{name}").on_report)
        known = {point.name: point for point in entry_points(group=GROUP)}
        if name in known:
            return cast(ReportWriter, known[name].load())
    except ImportError as error:
        allowed = f"a writer whose package is installed ({error})"
        package = f"'stepscope[{name}]'" if name in WRITERS else "what it needs"
        raise ConfigError("finish.report_to", name, allowed, f"pip install {package}") from None
    names = sorted({*WRITERS, *known})
    near = closest(name, names)
    fix = f"did you mean {near!r}?" if near else "install the package that brings it"
    raise ConfigError("finish.report_to", name, f"a writer: {', '.join(names)}", fix)
