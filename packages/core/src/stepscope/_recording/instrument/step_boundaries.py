"""Steps of an unedited training loop: captures that open and close at calls of its functions.

With `around`, each call is one step. With `begin`, a step begins when a call begins. With `end`, the step
ends when a call returns or raises. With `next`, a step ends and the next begins when a call returns. A step
also ends when the following step begins, and at the end of the process.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Mapping
from types import FunctionType
from typing import NamedTuple, Protocol, cast

from stepscope._recording.instrument import frameworks
from stepscope._recording.instrument.call_arguments import Arguments, Condition
from stepscope._recording.process import failures, fork
from stepscope._recording.process.identity import in_event_loop
from stepscope._recording.spans import results, wrapping
from stepscope._recording.spans.compiled import uncompiled
from stepscope.config import InstrumentConfig
from stepscope.errors import CaptureError, ours


class StepCapture(Protocol):
    """The capture of one step, with the methods that this module needs."""

    @property
    def blocks(self) -> bool:
        """True if `open` waits for other processes or engines."""

    def open(self) -> None: ...
    async def aopen(self) -> None: ...
    def close(self, error: str | None) -> None: ...
    async def aclose(self, error: str | None) -> None: ...


OPENER = "stepscope._recording.capture.unedited"
"""Module whose `new_capture` makes the captures. Imported by name when a step begins, because the module
imports this package, and most processes do not begin steps.

The name is a constant and not a registered object, because a Ray worker gets wrappers by unpickling, before
stepscope is configured in it."""


class Boundary(NamedTuple):
    """The effect of one function's calls on steps."""

    entry: InstrumentConfig
    """The `instrument` entry, in which `step` is set."""
    counts: bool
    """True if each call of a `begin` without `number` begins a step. False if another function is `next`,
    which then counts the steps."""

    @property
    def condition(self) -> Condition:
        """The condition for calls of the entry."""
        return Condition(self.entry.where, self.entry.same)


class Step(NamedTuple):
    """A step of the training loop, captured or not."""

    number: int
    capture: StepCapture | None
    is_around: bool
    """True if the step is one call (`around`). Calls within it do not begin or end steps."""


_step: Step | None = None
"""The running step of this process, or None. One writer: this module."""
_next = 0
"""Number of the next step, if steps are counted. One writer: this module."""
calls: Counter[str] = Counter()
"""{`module:name` of a function that begins or ends steps: number of its calls in this process}. One writer:
`Call`."""


def wrap(fn: FunctionType, boundary: Boundary, target: str) -> FunctionType:
    """Return a wrapper of `fn`, sync or async as `fn` is, that opens and closes captures at its calls.

    Raises:
        ConfigError: A path of `boundary` does not begin with an argument of `fn`.
        TypeError: `fn` is a generator, whose calls return before its work begins.
    """
    if wrapping.is_generator(fn):
        raise TypeError(f"{target} is a generator: take the function that consumes it as the step's boundary")
    arguments = Arguments(fn)
    boundary.condition.check(arguments, target)
    entry = boundary.entry
    for path in filter(None, (entry.number, *entry.workers.values(), *entry.engines.values())):
        arguments.check(path, target)
    made = wrapping.calling(
        fn,
        _CALL,
        _GOES_ON,
        True,
        boundaries=sys.modules[__name__],
        boundary=boundary,
        arguments=arguments,
        target=target,
    )
    return wrapping.wraps(fn, made, wrapping.declared(fn))


# Ray pickles a class by value, with the closures of its wrappers, so a closure contains only picklable
# objects.
_CALL = """
{async_}def wrapper({params}):
    if __is_off():
        return {await_}__fn({call})
    __call = __boundaries.Call(__boundary, __arguments, __target, ({args}), {{{kwargs}}})
    {await_}__boundaries.{a_}begin(__call)
    try:
        __result = {await_}__fn({call})
{goes_on}
    except BaseException as __error:
        {await_}__boundaries.{a_}switch(__call.failed(__error))
        raise
    {await_}__boundaries.{a_}switch(__call.returned())
    return __result
"""
# These lines are within `try`. After the `try` block, Python 3.14 has one more reference to the result than
# `results` expects for an exclusive object.
_GOES_ON = """
        __rest = __boundaries.follow(__call, __result)
        if __rest is not None:
            return __rest
"""


@uncompiled
def follow(call: Call, result: object) -> object:
    """If `result` is a coroutine, return a coroutine that ends the call when `result` ends. Return None for
    other results.
    """
    is_exclusive = results.is_exclusive(sys.getrefcount(result))
    held = results.unbegun(result, is_exclusive, call.drop) if call.has_end or call.is_late else None
    if held is not None:
        return held.stand_in(_to_its_end(held, call))
    if call.is_late:
        switch(call.before)
    return None


async def _to_its_end(held: results.Unbegun, call: Call) -> object:
    if call.is_late:
        await aswitch(call.before)
    try:
        result: object = await held.begin()
    except BaseException as error:
        await aswitch(call.failed(error))
        raise
    await aswitch(call.returned())
    return result


class Switch(NamedTuple):
    """A change of the step: a capture to close, the error that ended its step, and a capture to open
    afterwards.
    """

    close: StepCapture | None = None
    error: str | None = None
    open: StepCapture | None = None
    target: str = ""
    """`module:name` of the function whose call makes the change."""


_NOTHING = Switch()


class Call:
    """One call of a function (`target`) that begins or ends steps. The object is created before the function
    runs.
    """

    @uncompiled
    def __init__(
        self,
        boundary: Boundary,
        arguments: Arguments,
        target: str,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> None:
        calls[target] += 1
        frameworks.check_covered(target, args)
        self._boundary = boundary
        self._arguments = arguments
        self._given = (args, kwargs)
        self._target = target
        self._kind: str | None = boundary.entry.step
        self.before = _NOTHING
        self.is_late = False
        """True if the change `before` is made later, when the coroutine that the call returns is awaited."""
        if not boundary.condition.holds(arguments, args, kwargs):
            self._kind = None
        elif _step is not None and (_step.is_around or self._kind == "around"):
            self._kind = None  # a step inside another step is a part of the outer step
        elif self._kind in ("around", "begin"):
            self.before = self._start()
        # Settings are read last, because the first capture in a worker configures the worker.
        frameworks.read_settings(target, arguments, args, kwargs)

    def returned(self) -> Switch:
        """Return the change to make when the call returns."""
        if self._kind == "next":
            return self._start()
        return _finish(None) if self._kind in ("around", "end") else _NOTHING

    def failed(self, error: BaseException) -> Switch:
        """Return the change to make when the call raises."""
        return _finish(failures.describe(error)) if self._kind in ("around", "end") else _NOTHING

    @property
    def has_end(self) -> bool:
        """True if the end of the call makes a change."""
        return self._kind in ("around", "end", "next")

    def drop(self) -> None:
        """Make the changes of a call whose coroutine was dropped without being awaited."""
        if self.is_late:
            switch(self.before._replace(open=None))
        if self._kind == "around":
            switch(_finish(None))

    def _start(self) -> Switch:
        global _step, _next
        finished = _NOTHING
        try:
            path = self._boundary.entry.number
            number = None if path is None else self._arguments.number(path, *self._given)
            if self._kind == "begin" and _step is not None and self._is_within(_step, number):
                return _NOTHING
            finished = _finish(None)
            number = _next if number is None else number
            _next = number + 1
            _step = Step(number, self._capture(number, finished.close), self._kind == "around")
            return finished._replace(open=_step.capture, target=self._target)
        except ours() as error:
            _note("beginning a step of the framework", error)
            return finished

    def _is_within(self, step: Step, number: int | None) -> bool:
        """Return whether a call of a `begin` belongs to the running step."""
        return not self._boundary.counts if number is None else number == step.number

    def _capture(self, number: int, closing: StepCapture | None) -> StepCapture | None:
        entry, opener = self._boundary.entry, importlib.import_module(OPENER)
        engines, role = self._at(entry.engines), entry.role or "trainer"
        capture = opener.new_capture(number, self._workers(), engines, role, closing)
        return cast("StepCapture | None", capture)

    def _workers(self) -> dict[str, object] | None:
        return self._at(self._boundary.entry.workers) or None if "ray" in sys.modules else None

    def _at(self, paths: Mapping[str, str]) -> dict[str, object]:
        """Return {name: value} of `paths`, without missing or empty values."""
        values = {}
        for name, path in paths.items():
            try:
                value = self._arguments.read(path, *self._given)
            except LookupError:
                continue  # for example a critic that the run does not have
            if value is not None and not (isinstance(value, (list, dict, tuple)) and not value):
                values[name] = value
        return values


def begin(call: Call) -> None:
    """Close and open captures before a call of a plain function.

    If this would block the running event loop, it is left to the coroutine that the call may return.
    """
    changed = (call.before.close, call.before.open)
    if in_event_loop() and any(capture is not None and capture.blocks for capture in changed):
        call.is_late = True
    else:
        switch(call.before)


async def abegin(call: Call) -> None:
    """Close and open captures before a call of a coroutine function."""
    await aswitch(call.before)


def switch(change: Switch) -> None:
    """Close a capture and open another. An error is logged and not raised."""
    try:
        if change.close is not None:
            change.close.close(change.error)
        if change.open is not None:
            if change.open.blocks and in_event_loop():
                raise CaptureError(
                    f"{change.target} returns no coroutine: opening a capture with workers or engines in it "
                    "would block the running event loop. Fix: begin the step with an `async def`"
                )
            change.open.open()
    except ours() as error:
        _note("capturing a step of the framework", error)


async def aswitch(change: Switch) -> None:
    """Do what `switch` does, without blocking the event loop."""
    try:
        if change.close is not None:
            await change.close.aclose(change.error)
        if change.open is not None:
            await change.open.aopen()
    except ours() as error:
        _note("capturing a step of the framework", error)


def _note(doing: str, error: Exception) -> None:
    """Log an internal error, and store it as the reason if the program ends without a captured step."""
    opener = sys.modules.get(OPENER)
    if opener is not None:  # None if the import of the module failed
        opener.failed(error)
    failures.note(doing, error)


def _finish(error: str | None) -> Switch:
    global _step
    step, _step = _step, None
    return _NOTHING if step is None else Switch(close=step.capture, error=error)


def _forget() -> None:
    global _step
    _step = None  # the step belongs to the parent


fork.forgets("step of the framework", _forget)
