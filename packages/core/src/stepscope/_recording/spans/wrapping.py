"""Wrappers of functions, for `profile_step` and `instrument`. Their source is generated for each signature.

This is how dataclasses generate `__init__`. A `def wrapper(self, batch, *, lr)` that calls `fn(self, batch,
lr=lr)` has three advantages over a `*args, **kwargs` closure. It is faster while nothing is recorded. It
raises TypeErrors for wrong arguments where the user expects them. And its code object has the arguments and
the kind that other code inspects.

If Ray pickles a class by value, the closures of its wrappers are pickled too. A closure refers to the module
`slot`, which is pickled by reference. A value imported *from* `slot` would be copied, and the copy would
never change.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, KeysView, Mapping
from types import AsyncGeneratorType, CodeType, FunctionType, GeneratorType
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

from stepscope._recording.process import failures
from stepscope._recording.spans import compiled, results, slot
from stepscope._recording.spans.compiled import uncompiled
from stepscope._recording.spans.scopes import OFF, Scope
from stepscope.errors import ours
from stepscope.files.values import AttrValue, attr_values

declared_roles: set[str] = set()
"""Roles of the decorated functions of this process. Writers: `wrap`, and `instrument.calls`."""

Attrs: TypeAlias = "Mapping[str, AttrValue] | Callable[..., Mapping[str, AttrValue] | None]"


class Declared:
    """The arguments of `profile_step`, which the wrapper has as `__stepscope__`."""

    __slots__ = ("attrs", "is_async", "role", "stage")

    off = OFF
    """The span of a generator while nothing is recorded."""
    over = results.OVER
    """Types of results that are complete when they are returned."""

    def __init__(self, role: str | None, stage: str, attrs: Attrs | None, is_async: bool) -> None:
        self.role = role
        """The role, or None for the role of the enclosing span or the process."""
        self.stage = stage
        self.attrs = attrs
        self.is_async = is_async

    @uncompiled
    def attrs_of(self, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, AttrValue] | None:
        """Return the result of the user's `attrs` function for a call, or None if it raises."""
        compute = cast("Callable[..., Mapping[str, AttrValue] | None]", self.attrs)
        try:
            attrs = compute(*args, **kwargs)
            return None if attrs is None else attr_values(attrs)
        except ours() as failure:
            where = f"the attrs function of {self.role or 'any role'}/{self.stage}"
            reason = (
                f"{where} raised {failures.describe(failure)}: such calls are recorded without attributes"
            )
            failures.warn_once(reason, about=where)
            return None

    @uncompiled
    def follow(self, span: Scope, result: object) -> object:
        """If `result` continues the call, make `span` end with `result`. Return the object that the user gets
        instead of `result`, or None if `span` ends now; see `results.follow`.

        For a generator, `span` ends, and each resumption is recorded from now on.
        """
        is_exclusive = results.is_exclusive(sys.getrefcount(result))
        if span is OFF:
            return None
        try:
            if is_exclusive and isinstance(result, (GeneratorType, AsyncGeneratorType)):
                resumed = _resumed(result, self)
                span.__exit__(None, None, None)
                return resumed
            return results.follow(result, span, is_exclusive)
        except ours() as failure:
            failures.note(f"timing what {self.stage} returned to its end", failure)
            return None

    def start(self, inner: AsyncGenerator[object, object]) -> Awaitable[object]:
        """Resume an async generator for the first time, without registering it with the event loop.

        When an event loop ends, it closes all registered generators concurrently. The wrapper is registered,
        and closes the inner generator. If the loop closed the inner generator too, this would raise "already
        running".
        """
        first_iteration = sys.get_asyncgen_hooks().firstiter
        sys.set_asyncgen_hooks(firstiter=None)
        try:
            return inner.asend(None)
        finally:
            sys.set_asyncgen_hooks(firstiter=first_iteration)


_DECLARED, _REPLACES = "__stepscope__", "__stepscope_replaces__"
_OURS = frozenset((_DECLARED, _REPLACES))
W = TypeVar("W", bound=Callable[..., object])
_Generator: TypeAlias = "GeneratorType[Any, Any, Any] | AsyncGeneratorType[Any, Any]"


class Attributes(dict[str, object]):
    """The `__dict__` of a wrapper, from which `functools.wraps` copies only the user's attributes.

    Ray wraps each method of an actor and pickles the result by value. A copied attribute of stepscope would
    be pickled too, with the functions that it refers to and the globals of their module.
    """

    def keys(self) -> KeysView[str]:  # type: ignore[override] # typeshed's dict_keys has no constructor
        return self.copy().keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.copy())

    def copy(self) -> dict[str, object]:
        return {name: value for name, value in self.items() if name not in _OURS}

    def __reduce__(self) -> tuple[type[dict[str, object]], tuple[dict[str, object]]]:
        return dict, ({name: value for name, value in self.items()},)  # noqa: C416 # dict() would call keys()


def wraps(fn: FunctionType, wrapper: W, declared: Declared | None) -> W:
    """Return `wrapper` with the metadata of `fn` and the declared arguments."""
    functools.update_wrapper(wrapper, fn)
    attributes = Attributes(vars(wrapper))
    # `__wrapped__` of the original stays: for a decorated `step`, `step.__wrapped__` is `step` without its
    # no_grad.
    attributes.update(vars(fn))
    attributes.pop(compiled.INLINED, None)  # set if torch.compile returned `fn`
    if declared is not None:
        attributes[_DECLARED] = declared
    wrapper.__dict__ = attributes
    return wrapper


def declared(member: object) -> Declared | None:
    """Return the arguments of `profile_step` for a function or method, also below other decorators. Return
    None if `member` is not decorated.
    """
    return cast("Declared | None", _nearest(member, _DECLARED))


def mark_replacement(wrapper: Callable[..., object]) -> None:
    """Mark `wrapper` as a function that `instrument` has made."""
    vars(wrapper)[_REPLACES] = True


def is_replacement(member: object) -> bool:
    """Return whether `instrument` has made this function or method, also below other decorators."""
    return _nearest(member, _REPLACES) is True


def _nearest(member: object, attribute: str) -> object:
    wrapper: Any = getattr(member, "__func__", member)
    try:
        wrapper = inspect.unwrap(wrapper, stop=lambda inner: attribute in getattr(inner, "__dict__", ()))
    except ValueError:  # a cycle of wrappers
        return None
    return getattr(wrapper, "__dict__", {}).get(attribute)


# In each branch the user's function is called at one place, and `begin` and `__exit__` do not raise, so the
# function runs exactly once. torch.compile cannot split a function within `try`. So if the user's function
# breaks the graph, the wrapper runs as ordinary Python, and the call is recorded.
_CALL = """
{async_}def wrapper({params}):
    __session = __recording()
    if __session is None:
        try:
            return {await_}__fn({call})
        except BaseException:
            raise
    __span = __session.log.begin(__declared, {attrs})
    try:
        __result = {await_}__fn({call})
{goes_on}
        __span.__exit__(None, None, None)
    except BaseException as __error:
        __span.__exit__(None, __error, None)
        raise
    return __result
"""
# A plain function may return a coroutine, for example a decorator above an `async def`.
_GOES_ON = """
        if type(__result) not in __declared.over:
            __rest = __declared.follow(__span, __result)
            if __rest is not None:
                return __rest
"""

# Each resumption has a span, which ends before the `yield`, because the consumer's time does not belong to
# the generator, and another task may resume or close it next. `slot.active` is read at every resumption,
# because a generator may last longer than a capture. While the generator is suspended, its frame must not
# reference the yielded value (hence the list), nor an exception that was thrown in, whose traceback
# references the frame. GeneratorExit closes a generator early and is not an error of the span. While nothing
# is recorded, only the loop at the top runs. An exception there was raised by the inner generator if it has
# ended; otherwise the consumer has thrown it in.
_GENERATOR = """
{async_}def wrapper({params}):
    __inner = __fn({call})
    if __is_compiled():
        return {rest}
    __send = __inner.{send}
    __resume, __value, __index, __session = {first}, 0, None
    __off = __span = __declared.off
    while True:
        if __resume is __send and __value is None:
            try:
                while __slot.active is None and __value is None:
                    __index += 1
                    __value = yield {await_}__send(None)
            except BaseException as __stop:
                if __inner.{frame} is not None:
                    __resume, __value = __inner.{throw}, __stop
                elif isinstance(__stop, {end}):
                    return {returned}
                else:
                    raise
        __before, __session = __session, __slot.active
        if __session is not None:
            __span = __session.log.begin(__declared, {attrs}, __index, __session is not __before)
        try:
            __item = [{await_}__resume(__value)]
            if __session is not None:
                __span.__exit__(None, None, None)
                __span = __off
        except {end} as __stop:
            __span.__exit__(None, None, None)
            return {returned}
        except GeneratorExit:
            __span.__exit__(None, None, None)
            raise
        except BaseException as __error:
            __span.__exit__(None, __error, None)
            raise
        finally:
            __value = None
        __index += 1
        try:
            __value = yield __item.pop()
            __resume = __send
        except BaseException as __error:
            __resume, __value = __inner.{throw}, __error
"""

_SYNC = {"async_": "", "await_": "", "a_": "", "goes_on": _GOES_ON}
_ASYNC = {"async_": "async ", "await_": "await ", "a_": "a", "goes_on": ""}
_SEND = {
    "first": "__send, None",
    "send": "send",
    "throw": "throw",
    "frame": "gi_frame",
    "rest": "(yield from __inner)",
    "end": "StopIteration",
    "returned": "__stop.value",
}
_ASEND = {
    "first": "__declared.start, __inner",
    "send": "asend",
    "throw": "athrow",
    "frame": "ag_frame",
    "rest": "",  # torch does not compile async generators
    "end": "StopAsyncIteration",
    "returned": "",
}


_READING = {"slot": slot, "recording": compiled.recording, "is_compiled": compiled.is_compiled}
"""{name in the closure of a wrapper: object through which it reads `slot.active`}."""


def wrap(fn: FunctionType, *, role: str | None, stage: str | None, attrs: Attrs | None) -> FunctionType:
    """Return a wrapper of `fn`, of the same kind and with the same signature and metadata, that records
    calls.
    """
    template, pieces = _kind(fn)
    declared = Declared(role, fn.__name__ if stage is None else stage, attrs, is_async=pieces["async_"] != "")
    if role is not None:
        declared_roles.add(role)
    computed = "__declared.attrs_of(({args}), {{{kwargs}}}) if __session.calls_attrs else None"
    pieces = {**pieces, "attrs": _of(fn, computed) if callable(attrs) else "__declared.attrs"}
    made = _build(fn, _of(fn, template, **pieces), {"fn": fn, "declared": declared, **_READING})
    return wraps(fn, made, declared)


def calling(fn: FunctionType, template: str, goes_on: str, always: bool, **names: object) -> FunctionType:
    """Return a function of the same kind and signature as `fn`, with another body. `fn` must not be a
    generator function.

    Args:
        template: The source, like `_CALL`. It may use `__fn`, `__is_off`, and each name of `names` with two
            underscores in front.
        goes_on: Source that is added for plain functions, because they may return a coroutine.
        always: True if the body runs without a capture too, and is skipped only in compiled code.
    """
    pieces = _ASYNC if inspect.iscoroutinefunction(fn) else {**_SYNC, "goes_on": goes_on}
    is_off = compiled.is_compiled if always else compiled.is_idle
    return _build(fn, _of(fn, template, **pieces), {"fn": fn, "is_off": is_off, **names})


def is_generator(fn: FunctionType) -> bool:
    """Return whether `fn` is a generator function, sync or async."""
    return inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn)


def _resumed(inner: _Generator, declared: Declared) -> object:
    """Return a generator that records each resumption of `inner`."""
    resuming = _resuming(isinstance(inner, AsyncGeneratorType))
    made: Any = resuming(lambda given: given, declared, *_READING.values())(inner)
    made.__name__, made.__qualname__ = inner.__name__, inner.__qualname__
    return made


@functools.cache
def _resuming(is_async: bool) -> Callable[..., FunctionType]:
    pieces = _ASYNC | _ASEND if is_async else _SYNC | _SEND
    source = _GENERATOR.format(params="given", call="given", attrs="__declared.attrs", **pieces)
    return _factory(source, f"{__name__}._resumed", ("fn", "declared", *_READING))


def _kind(fn: FunctionType) -> tuple[str, dict[str, str]]:
    if inspect.iscoroutinefunction(fn):
        return _CALL, _ASYNC
    if inspect.isasyncgenfunction(fn):
        return _GENERATOR, _ASYNC | _ASEND
    if inspect.isgeneratorfunction(fn):
        return _GENERATOR, _SYNC | _SEND
    return _CALL, _SYNC


class _Signature(NamedTuple):
    """A signature as pieces of source code. `args` ends with a comma if it is not empty, to form a tuple."""

    params: str
    """Declared parameters, for example `a, /, b, *c, d, **e`."""
    call: str
    """Arguments of a call with all parameters, for example `a, b, *c, d=d, **e`."""
    args: str
    """Positional arguments only, for example `a, b, *c`."""
    kwargs: str
    """Keyword arguments as items of a dict, for example `'d': d, **e`."""

    @classmethod
    def of(cls, code: CodeType) -> _Signature:
        """Read the signature from the code object, because `inspect.signature` would return the signature of
        a decorated function.
        """
        taken = iter(code.co_varnames)
        args = [f"{name}, " for name in itertools.islice(taken, code.co_argcount)]
        only = list(itertools.islice(taken, code.co_kwonlyargcount))
        star = f"*{next(taken)}, " if code.co_flags & inspect.CO_VARARGS else ""
        stars = f"**{next(taken)}, " if code.co_flags & inspect.CO_VARKEYWORDS else ""
        if any(name.lstrip("*").startswith("__") for name in (*args, *only, star, stars)):
            # Names in the templates begin like this.
            return cls("*__args, **__kwargs", "*__args, **__kwargs", "*__args, ", "**__kwargs")
        slash = ["/, "] if code.co_posonlyargcount else []
        params = [*args[: code.co_posonlyargcount], *slash, *args[code.co_posonlyargcount :]]
        params += [star or ("*, " if only else ""), *(f"{name}, " for name in only), stars]
        return cls(
            params="".join(params).removesuffix(", "),  # Python does not allow a comma after **e
            call="".join([*args, star, *(f"{name}={name}, " for name in only), stars]),
            args="".join([*args, star]),
            kwargs="".join([*(f"{name!r}: {name}, " for name in only), stars]),
        )


def _of(fn: FunctionType, template: str, **pieces: str) -> str:
    """Fill the signature of `fn` and `pieces` into the template."""
    return template.format(**_Signature.of(fn.__code__)._asdict(), **pieces)


def _build(fn: FunctionType, source: str, names: Mapping[str, object]) -> FunctionType:
    """Compile the source and return its function `wrapper`, with the name, defaults and globals of `fn`.
    `names` are free variables of the source, with two underscores in front.
    """
    built = _factory(source, f"{fn.__module__}.{fn.__qualname__}", tuple(names))(*names.values())
    # The globals are those of `fn`, in which libraries such as FastAPI look up annotations in strings.
    code = built.__code__.replace(co_name=fn.__name__)
    wrapper = FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, built.__closure__)
    wrapper.__kwdefaults__ = fn.__kwdefaults__ and dict(fn.__kwdefaults__)
    return wrapper


def _factory(source: str, name: str, names: tuple[str, ...]) -> Callable[..., FunctionType]:
    header = f"def factory({', '.join(f'__{free}' for free in names)}):"
    factory = header + source.replace("\n", "\n    ") + "return wrapper\n"
    namespace: dict[str, Callable[..., FunctionType]] = {}
    exec(compile(factory, _register(factory, name), "exec"), namespace)
    return namespace["factory"]


def _register(source: str, name: str) -> str:
    """Register generated source so that tracebacks, `inspect` and pdb find it, and return its file name."""
    lines = source.splitlines(keepends=True)
    names = itertools.chain([name], (f"{name} {number}" for number in itertools.count(2)))
    files = (f"<profile_step {name}>" for name in names)
    # Equal source shares a file name. Different source of a function with the same name gets another.
    return next(file for file in files if _cached(file, source, lines) == lines)


def _cached(file: str, source: str, lines: list[str]) -> object:
    """Return the lines that are registered for `file`. If `file` is unknown, register and return `lines`.
    None if the entry of `file` has no lines.
    """
    entry = linecache.cache.setdefault(file, (len(source), None, lines, file))
    return entry[2] if len(entry) == 4 else None
