"""The kinds of `instrument` entries: the scope that a call opens, and the values that are read from the call.

Ray pickles a class by value, with the closures of its wrappers. So a wrapper's closure may contain only
objects that can be pickled.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import AsyncGeneratorType, FunctionType, GeneratorType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, TypeVar, cast

from stepscope._recording.instrument.call_arguments import (
    Arguments,
    Condition,
    Number,
    is_result,
    name_of,
    names_of,
    number_of,
    request_of,
    texts_of,
    version_of,
    versions_of,
)
from stepscope._recording.process import failures
from stepscope._recording.spans import api, results, slot, wrapping
from stepscope._recording.spans.compiled import uncompiled
from stepscope._recording.spans.scopes import OFF, Scope, next_turn
from stepscope._recording.spans.wrapping import Attrs, Declared
from stepscope.config._instrument import paths_in
from stepscope.engines import local_engines
from stepscope.errors import ours
from stepscope.files.values import AttrValue, whole

if TYPE_CHECKING:
    from stepscope._recording.spans.maker import SpanMaker

Args: TypeAlias = tuple[object, ...]
Kwargs: TypeAlias = dict[str, object]
T = TypeVar("T")

_ids = itertools.count()
"""Counter that numbers trajectories without an id. One writer: `TrajectoryCalls`."""


class Timing(NamedTuple):
    """One `instrument` entry: the role, stage and values of the calls that it records."""

    role: str
    stage: str | None
    attrs: Attrs | None
    condition: Condition
    """The calls that the entry is for. If a function has several timings, the first whose condition holds
    records the call."""
    kind: str = "span"
    # Paths to values of a call.
    id: tuple[str, ...] = ()
    policy_version: str | None = None
    request: str | None = None
    turn: str | None = None
    tool: str | None = None
    values: Mapping[str, str] = {}  # read-only
    engine: str | None = None
    replica: str | None = None
    adapter: str | None = None
    """Name of the engine's adapter, or None for other kinds."""

    def label(self, name: str) -> str:
        """Return `role/stage` of the spans of a function `name`, with `*` for a stage that each call sets."""
        return f"{self.role}/{'*' if self.tool else self.stage or name.rpartition('.')[2]}"


class Calls:
    """Recorder of the calls of one entry. Each kind of entry has a subclass."""

    always: ClassVar[bool] = False
    """True if calls have a scope even without a capture, so that spans of a capture that opens during the
    call have this scope as parent."""
    over = results.OVER
    """Types of results after which a call is over. Results of other types, such as a coroutine, may continue
    the work."""

    def __init__(self, fn: FunctionType, timing: Timing, target: str) -> None:
        self.timing = timing
        self.target = target
        self.name = fn.__name__
        self.is_async = inspect.iscoroutinefunction(fn)
        self.arguments = Arguments(fn)
        self._logged: set[str] = set()
        """Fields for which a path without a value was logged."""
        single = (timing.policy_version, timing.request, timing.turn, timing.tool, timing.replica)
        texts = [path for text in (*timing.id, timing.engine or "") for path in paths_in(text)]
        for path in filter(None, (*texts, *single, *timing.values.values())):
            self.arguments.check(path, target, after=True)

    @uncompiled
    def enter(self, args: Args, kwargs: Kwargs) -> Scope:
        """Open the scope of a call. Never raise. After an error, the call is not recorded."""
        try:
            return self.open(args, kwargs)
        except RecursionError:
            return OFF  # not noted, because the call itself needs the remaining depth
        except ours() as error:
            failures.note(f"the {self.timing.kind} of {self.target}", error)
            return OFF

    @uncompiled
    def leave(self, scope: Scope, args: Args, kwargs: Kwargs, result: object) -> None:
        """Read the values of a call that has returned `result`, and close its scope."""
        try:
            self.read(scope, args, kwargs, result)
        finally:
            scope.__exit__(None, None, None)

    @uncompiled
    def follow(self, scope: Scope, args: Args, kwargs: Kwargs, result: object) -> object:
        """If `result` continues the call (a coroutine, a future), return an object to return in its place,
        which ends the scope later. Return None if the call is over.
        """
        is_exclusive = results.is_exclusive(sys.getrefcount(result))
        if isinstance(result, (GeneratorType, AsyncGeneratorType)) and "generator" not in self._logged:
            self._logged.add("generator")
            failures.warn(
                "stepscope: %s (kind: %s) returned a generator, and ends there. Fix: take the function that "
                "reads it",
                self.target, self.timing.kind,
            )  # fmt: skip
        try:
            return results.follow(result, scope, is_exclusive, partial(self.read, scope, args, kwargs))
        except ours() as error:
            failures.note(f"the end of {self.target}", error)
            return None

    def read(self, scope: Scope, args: Args, kwargs: Kwargs, result: object) -> None:
        """Read the values of a call that has ended. Never raise."""
        try:
            if slot.active is not None:
                self.returned(scope, args, kwargs, result)
        except RecursionError:
            pass
        except ours() as error:
            failures.note(f"the values of {self.target}", error)

    def open(self, args: Args, kwargs: Kwargs) -> Scope:
        """Enter and return the scope of a call that is about to begin."""
        return OFF

    def returned(self, scope: Scope, args: Args, kwargs: Kwargs, result: object) -> None:
        """Read the values that the entry lists for the end of the call, and add them to the scope."""
        numbers = {
            name: self.number(f"values.{name}", path, args, kwargs, (result,))
            for name, path in self.timing.values.items()
        }
        values = {name: number for name, number in numbers.items() if number is not None}
        if values:
            scope.set(**values)
        self.name_request(scope, args, kwargs, (result,))
        version = self.version(args, kwargs, (result,))
        if version is not None and scope is not OFF:
            scope.policy_version, scope.resolved = version, None

    def name_request(
        self, scope: Scope, args: Args, kwargs: Kwargs, returned: tuple[object, ...] = ()
    ) -> None:
        """Add the request id to the scope, if the entry reads it now (before or after the call)."""
        path = self.timing.request
        if path is None or is_result(path) != bool(returned) or slot.active is None:
            return
        name = self._read("request", path, request_of, args, kwargs, returned)
        if name is not None:
            scope.set(request_id=name)

    def number(
        self, field: str, path: str | None, args: Args, kwargs: Kwargs, returned: tuple[object, ...] = ()
    ) -> Number | None:
        """Return the number at a path, or None if there is no value or the value is None."""
        return None if path is None else self._read(field, path, number_of, args, kwargs, returned)

    def version(self, args: Args, kwargs: Kwargs, returned: tuple[object, ...] = ()) -> int | None:
        """Return the version of the weights if its path can be read now, else None. A path into the result is
        read after the call (`returned` is not empty), any other path before it.
        """
        path = self.timing.policy_version
        if path is None or is_result(path) != bool(returned):
            return None
        return whole(self._read("policy_version", path, version_of, args, kwargs, returned))

    def _read(
        self,
        field: str,
        path: str,
        convert: Callable[[object], T],
        args: Args,
        kwargs: Kwargs,
        returned: tuple[object, ...] = (),
    ) -> T | None:
        try:
            return convert(self.arguments.read(path, args, kwargs, returned))
        except ours() as error:  # attributes of the user's objects may raise anything
            if field not in self._logged:
                self._logged.add(field)
                reason = str(error) if isinstance(error, LookupError) else failures.describe(error)
                failures.warn(
                    "stepscope: %s of %s (kind: %s) is left out: nothing to read at %s: %s",
                    field, self.target, self.timing.kind, path, reason,
                )  # fmt: skip
            return None


class SpanCalls(Calls):
    """Calls of the kind `weight_sync`, or `span` with values."""

    def __init__(self, fn: FunctionType, timing: Timing, target: str) -> None:
        super().__init__(fn, timing, target)
        self.declared = Declared(timing.role, timing.stage or self.name, timing.attrs, self.is_async)
        wrapping.declared_roles.add(timing.role)

    def open(self, args: Args, kwargs: Kwargs) -> Scope:
        # Like a decorated function: in discrete mode, the span has its own window.
        session = slot.active
        if session is None:
            return OFF
        version = self.version(args, kwargs)
        scope = cast("SpanMaker", session.log).begin(self.declared, _constants(self.timing))
        if version is not None and scope is not OFF:
            scope.policy_version, scope.resolved = version, None
        self.name_request(scope, args, kwargs)
        return scope


class ToolCalls(Calls):
    """Calls of a tool. The span's stage is the tool's name."""

    def open(self, args: Args, kwargs: Kwargs) -> Scope:
        path = self.timing.tool
        name = None if path is None else self._read("tool", path, name_of, args, kwargs)
        stage = name or self.timing.stage or self.name
        return api.span(stage, role=self.timing.role, attrs=_constants(self.timing)).__enter__()


class TrajectoryCalls(Calls):
    """Calls that are trajectories."""

    always = True

    def open(self, args: Args, kwargs: Kwargs) -> Scope:
        version = self.version(args, kwargs)
        return api.trajectory(
            self._id(args, kwargs), policy_version=version, attrs=_constants(self.timing)
        ).__enter__()

    def _id(self, args: Args, kwargs: Kwargs) -> str:
        names = [self._filled(text, args, kwargs) for text in self.timing.id]
        if names and None not in names:
            return "/".join(filter(None, names))
        return f"{self.name}-{os.uname().nodename}-{os.getpid()}-{next(_ids)}"

    def _filled(self, text: str, args: Args, kwargs: Kwargs) -> str | None:
        """Return the name at the path `text`, or `text` with each `{path}` replaced by a name. None if there
        is no value.
        """
        filled = text if "{" in text else f"{{{text}}}"
        for path in paths_in(text):
            name = self._read("id", path, name_of, args, kwargs)
            if name is None:
                return None
            filled = filled.replace(f"{{{path}}}", name)
        return filled


class TurnCalls(Calls):
    """Calls that are turns of a trajectory."""

    always = True

    def open(self, args: Args, kwargs: Kwargs) -> Scope:
        path = self.timing.turn
        index = next_turn() if path is None else whole(self.number("index", path, args, kwargs))
        version = self.version(args, kwargs)
        scope = api.turn(cast(int, index), attrs=_constants(self.timing)).__enter__()
        if version is not None:
            scope.policy_version, scope.resolved = version, None
        self.name_request(scope, args, kwargs)
        return scope


class ConsumeCalls(Calls):
    """Calls that take trajectories for training. Ids are read before the call, or after it if a path begins
    with the result.
    """

    def __init__(self, fn: FunctionType, timing: Timing, target: str) -> None:
        super().__init__(fn, timing, target)
        paths = [path for text in self.timing.id for path in paths_in(text)]
        self.is_late = any(map(is_result, (*paths, self.timing.policy_version or "")))

    def open(self, args: Args, kwargs: Kwargs) -> Scope:
        if not self.is_late:
            self._consume(args, kwargs, ())
        return OFF

    def returned(self, scope: Scope, args: Args, kwargs: Kwargs, result: object) -> None:
        if self.is_late:
            self._consume(args, kwargs, (result,))

    def _consume(self, args: Args, kwargs: Kwargs, returned: tuple[object, ...]) -> None:
        session = slot.active
        parts = [self._ids(text, args, kwargs, returned) for text in self.timing.id]
        if session is None or None in parts:
            return
        ids = joined(cast("list[list[str]]", parts))
        path = self.timing.policy_version
        read = path and self._read("policy_version", path, versions_of, args, kwargs, returned)
        versions = [None] if not read or len(read) not in (1, len(ids)) else read
        for at, name in enumerate(ids):
            session.consume(name, None, whole(versions[at % len(versions)]))

    def _ids(self, text: str, args: Args, kwargs: Kwargs, returned: tuple[object, ...]) -> list[str] | None:
        """Return the names at the path `text`, or copies of `text` with each `{path}` replaced by a name.
        None if there is no value.
        """
        read = {path: self._read("id", path, names_of, args, kwargs, returned) for path in paths_in(text)}
        columns = {path: names for path, names in read.items() if names is not None}
        if len(columns) < len(read):
            return None
        return texts_of(text, columns) if "{" in text else columns[text]


class EngineCalls(Calls):
    """Calls that build or return an inference engine."""

    always = True

    def read(self, scope: Scope, args: Args, kwargs: Kwargs, result: object) -> None:
        """Register the engines at the entry's path. None at the path means that there is no engine."""
        try:
            adapter = str(self.timing.adapter)
            engines = self._engines(args, kwargs, result)
            number = self.number("replica", self.timing.replica, args, kwargs, (result,))
            for engine in engines:
                local_engines.register(adapter, engine, whole(number) if len(engines) == 1 else None)
            if not engines:
                local_engines.register_none(adapter)
        except LookupError:
            pass  # already logged
        except ours() as error:
            failures.note(f"the engine of {self.target}", error)

    def _engines(self, args: Args, kwargs: Kwargs, result: object) -> list[object]:
        text = str(self.timing.engine)
        convert = names_of if "{" in text else _items_of
        read = {path: self._read("engine", path, convert, args, kwargs, (result,)) for path in paths_in(text)}
        columns = {path: items for path, items in read.items() if items is not None}
        if len(columns) < len(read):
            raise LookupError(text)
        return list(texts_of(text, columns) if "{" in text else columns[text])


_CALLS: dict[str, type[Calls]] = {
    "span": SpanCalls,
    "weight_sync": SpanCalls,
    "tool": ToolCalls,
    "turn": TurnCalls,
    "trajectory": TrajectoryCalls,
    "consume": ConsumeCalls,
    "engine": EngineCalls,
}
SPANS = ("span", "weight_sync", "tool")
LAYERS = (("consume",), SPANS, ("turn",), ("trajectory",), ("engine",))
"""Kinds by layer of wrappers, innermost layer first. A call has at most one kind of each layer."""


_CALL = """
{async_}def wrapper({params}):
    if __is_off():
        try:
            return {await_}__fn({call})
        except BaseException:
            raise
    __args, __kwargs = ({args}), {{{kwargs}}}
    __scope = __calls.enter(__args, __kwargs)
    try:
        __result = {await_}__fn({call})
{goes_on}
        __calls.leave(__scope, __args, __kwargs, __result)
    except BaseException as __error:
        __scope.__exit__(None, __error, None)
        raise
    return __result
"""
_GOES_ON = """
        if type(__result) not in __calls.over:
            __rest = __calls.follow(__scope, __args, __kwargs, __result)
            if __rest is not None:
                return __rest
"""


def is_always(timings: Iterable[Timing]) -> bool:
    """Return whether calls of any of these timings have a scope even without a capture."""
    return any(_CALLS[timing.kind].always for timing in timings)


def wrap(fn: FunctionType, timing: Timing, target: str) -> FunctionType:
    """Return a wrapper of `fn`, sync or async as `fn` is, whose calls are recorded by `timing`.

    Raises:
        ConfigError: A path does not begin with an argument of `fn`.
        TypeError: `fn` is a generator, and `timing` is not a plain span.
    """
    if timing.kind == "span" and not (timing.values or timing.policy_version or timing.request):
        return wrapping.wrap(fn, role=timing.role, stage=timing.stage, attrs=timing.attrs)
    if wrapping.is_generator(fn):
        raise TypeError(
            f"{target} is a generator: it can be a plain span alone. Fix: take the function that reads it, "
            "or write {kind: span, role: ...} without values and policy_version"
        )
    calls = _CALLS[timing.kind](fn, timing, target)
    wrapper = wrapping.calling(fn, _CALL, _GOES_ON, calls.always, calls=calls)
    declared = calls.declared if isinstance(calls, SpanCalls) else wrapping.declared(fn)
    return wrapping.wraps(fn, wrapper, declared)


def joined(parts: list[list[str]]) -> list[str]:
    """Return ids joined from their parts with `/`. A part with a single name is used in every id."""
    count = min((len(part) for part in parts if len(part) != 1), default=1)
    return ["/".join(part[at % len(part)] for part in parts) for at in range(count)]


def _items_of(value: object) -> list[Any]:
    return [item for item in (value if isinstance(value, list | tuple) else [value]) if item is not None]


def _constants(timing: Timing) -> Mapping[str, AttrValue] | None:
    return cast("Mapping[str, AttrValue] | None", timing.attrs)
