"""Steps of a loop that one cannot edit: captures opened and closed around, or between, calls in it.

A call `around` is one step. With `begin` a step starts when a call does; with `end` it is over when a call
is, by return or by exception. With `next` one step is over and another starts when a call returns. A step
also ends where the following one begins, and with the process.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NamedTuple, cast

from stepscope.recording.capture import capture, prepare
from stepscope.recording.instrument.call_arguments import Arguments, Condition
from stepscope.recording.process import failures
from stepscope.recording.process.failures import describe
from stepscope.recording.spans import slot, wrapping


class Boundary(NamedTuple):
    """What calls of one function have to do with steps."""

    kind: str
    """`around`, `begin`, `end` or `next`."""
    role: str
    """Of this process."""
    number: str | None
    """Path to the step's number; None: they are counted."""
    workers: Mapping[str, str]
    """{role: path to its Ray actors}."""
    condition: Condition
    counts: bool = True
    """Whether each call of a `begin` without `number` begins a step: not beside a `next`, which counts."""


class Step:
    """A step of the loop, captured or not."""

    __slots__ = ("capture", "number", "pid")

    def __init__(self, number: int, capture: capture.Capture | None) -> None:
        self.number = number
        self.capture = capture
        self.pid = os.getpid()


_step: Step | None = None
"""The step that this process' loop is in. One writer: this module."""
_next = 0
"""The number of the next step that is counted."""
_calls: Counter[str] = Counter()
"""How often each boundary was called here. One writer: `begin`."""


def calls_of(target: str) -> int:
    """How often this process called the boundary `module:name`."""
    return _calls[target]


def wrap(fn: FunctionType, boundary: Boundary, target: str) -> FunctionType:
    """A function of `fn`'s kind that opens and closes captures as `boundary` says.

    Raises:
        ConfigError: a path of `boundary` does not begin with an argument of `fn`.
        TypeError: it is a generator, whose calls begin and end nothing.
    """
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(f"{target} is a generator: take the function that consumes it as the step's boundary")
    arguments = Arguments(fn)
    boundary.condition.check(arguments, target)
    for path in (*([boundary.number] if boundary.number else ()), *boundary.workers.values()):
        arguments.check(path, target)
    made = (_async if inspect.iscoroutinefunction(fn) else _sync)(fn, boundary, arguments, target)
    return cast(FunctionType, wrapping.wraps(fn, made, wrapping.declared(fn)))


# What is closed over travels with a Ray class by value: modules and importable classes alone.


def _sync(fn: FunctionType, boundary: Boundary, arguments: Arguments, target: str) -> Callable[..., Any]:
    def stepped(*args: Any, **kwargs: Any) -> Any:
        call = begin(boundary, arguments, target, args, kwargs)
        switch(call.before)
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:
            switch(call.failed(error))
            raise
        switch(call.returned())
        return result

    return stepped


def _async(fn: FunctionType, boundary: Boundary, arguments: Arguments, target: str) -> Callable[..., Any]:
    async def stepped(*args: Any, **kwargs: Any) -> Any:
        call = begin(boundary, arguments, target, args, kwargs)
        await aswitch(call.before)
        try:
            result = await fn(*args, **kwargs)
        except BaseException as error:
            await aswitch(call.failed(error))
            raise
        await aswitch(call.returned())
        return result

    return stepped


class Switch(NamedTuple):
    """The capture to close, and the one to open then."""

    close: capture.Capture | None = None
    error: str | None = None
    open: capture.Capture | None = None
    workers: object = None
    """Of `open`, and so is `role`."""
    role: str = ""


_NOTHING = Switch()


class Call:
    """One call of a boundary."""

    def __init__(
        self, boundary: Boundary, arguments: Arguments, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        self._boundary = boundary
        self._arguments = arguments
        self._given = (args, kwargs)
        self._kind = boundary.kind
        self.before = _NOTHING
        if not (boundary.condition.any_call or boundary.condition.holds(arguments, args, kwargs)):
            self._kind = "none"
        elif self._kind == "around" and _here() is not None:
            self._kind = "none"  # a step of its own inside one is a part of that
        elif self._kind in ("around", "begin"):
            self.before = self._start()

    def returned(self) -> Switch:
        """What to do once it has returned."""
        if self._kind == "next":
            return self._start()
        return _finish(None) if self._kind in ("around", "end") else _NOTHING

    def failed(self, error: BaseException) -> Switch:
        """What to do once it has raised."""
        return _finish(describe(error)) if self._kind in ("around", "end") else _NOTHING

    def _start(self) -> Switch:
        global _step, _next
        finished = _NOTHING
        try:
            number = self._number()
            here = _here()
            if self._kind == "begin" and here is not None and self._is_within(here, number):
                return _NOTHING
            finished = _finish(None)
            number = _next if number is None else number
            _next = number + 1
            workers = self._workers()
            _step = Step(number, self._capture(number, workers, finished.close))
            return finished._replace(open=_step.capture, workers=workers, role=self._boundary.role)
        except Exception as error:
            failures.note("beginning a step of the framework", error)
            return finished

    def _is_within(self, here: Step, number: int | None) -> bool:
        """Whether a call of a `begin` is a part of the step that one is in."""
        return not self._boundary.counts if number is None else number == here.number

    def _number(self) -> int | None:
        if self._boundary.number is None:
            return None
        return self._arguments.number(self._boundary.number, *self._given)

    def _capture(
        self, number: int, workers: object, closing: capture.Capture | None
    ) -> capture.Capture | None:
        """None while somebody else captures in this process: the user, or the owner of this worker."""
        other = capture.opened()
        if other is None and slot.active is not None:
            return None
        if other is not None and other is not closing:
            return None
        return capture.capture_unedited(number, workers=workers, role=self._boundary.role)

    def _workers(self) -> dict[str, object] | None:
        if "ray" not in sys.modules:
            return None
        found = {}
        for role, path in self._boundary.workers.items():
            try:
                group = self._arguments.read(path, *self._given)
            except LookupError:
                continue  # a critic that this run does not have
            if group is not None and group not in ([], {}, ()):
                found[role] = group
        return found or None


def begin(
    boundary: Boundary,
    arguments: Arguments,
    target: str,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Call:
    """A call of a boundary, about to be made."""
    _calls[target] += 1
    return Call(boundary, arguments, args, kwargs)


def switch(what: Switch) -> None:
    """Closes and opens. Trouble is logged, and the loop goes on."""
    try:
        if what.close is not None:
            what.close.close(error=what.error)
        if what.open is not None:
            prepare.before_first_step(what.open.config, what.workers, what.role)
            what.open.open()
    except Exception as error:
        failures.note("capturing a step of the framework", error)


async def aswitch(what: Switch) -> None:
    """As `switch`, without blocking the event loop."""
    try:
        if what.close is not None:
            await what.close.aclose(error=what.error)
        if what.open is not None:
            await prepare.abefore_first_step(what.open.config, what.workers, what.role)
            await what.open.aopen()
    except Exception as error:
        failures.note("capturing a step of the framework", error)


def _here() -> Step | None:
    """The step that this process is in; one that a forked child was born with is its parent's."""
    return _step if _step is not None and _step.pid == os.getpid() else None


def _finish(error: str | None) -> Switch:
    global _step
    here, _step = _here(), None
    return _NOTHING if here is None else Switch(close=here.capture, error=error)
