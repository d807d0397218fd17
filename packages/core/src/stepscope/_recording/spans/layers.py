"""Insertion of a wrapper among the decorators of a function, at a place where no decorator notices the
wrapper.

A decorator may inspect the frame of its caller: verl's `auto_await` returns a coroutine if its caller is a
coroutine, else the awaited result. The wrapper is placed below such a decorator, and a copy of the
decorator's function calls the wrapper, so that the caller stays the same. If plain
functions decorate an `async def`, the wrapper is placed below these functions too, to measure the coroutine
and not only the call that returns it.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType

from stepscope._recording.spans import wrapping

_COMPILED = "_torchdynamo_orig_callable"
"""Attribute of torch.compile's result whose value is the function to compile."""
_DEEPEST = 50
_READ = 3
"""Functions that a decorator calls are inspected too, up to this depth of calls, if they are in the
decorator's module."""


def placed(fn: FunctionType, wrap: Callable[[FunctionType], FunctionType]) -> FunctionType:
    """Apply `wrap` to `fn`, or to a function below those decorators of `fn` that would notice the wrapper.
    Return the new function.

    Raises:
        TypeError: `fn` inspects the frame of its caller, and no function below it can be wrapped.
    """
    path = list(path_of(fn))
    places = (_coroutine_in(path), *range(len(path)))
    place = next((at for at in places if not _looks_at_caller(path, at)), None)
    if place is None:
        raise TypeError(
            f"{fn.__module__}.{fn.__qualname__} looks at the frame of its caller, and would find a wrapper. "
            "Fix: time the function that calls it, or write `with span(...)` inside it"
        )
    made = wrap(path[place])
    for at in range(place, 0, -1):
        made = _rebuilt(path[at - 1], path[at], made)
    return made


def redirected(fn: FunctionType, old: FunctionType, new: FunctionType) -> bool:
    """Make `fn`, or the decorator below it that calls `old`, call `new`. Return False if `old` is not below
    `fn`.

    The calling function is changed in place and not copied, because Ray has `fn` in the class and in a table
    of methods. Ray pickles both by value. It would pickle `old` with the globals of its module, because the
    name of `old` now refers to `new`.
    """
    path = list(path_of(fn))
    if old not in path[1:]:
        return False
    above = path[path.index(old) - 1]
    for cell in above.__closure__ or ():
        if _content(cell) is old:
            cell.cell_contents = new
    if vars(above).get("__wrapped__") is old:
        vars(above)["__wrapped__"] = new
    return True


def path_of(fn: FunctionType) -> Iterator[FunctionType]:
    """Yield `fn`, the function that it decorates, and so on."""
    below: FunctionType | None = fn
    for _ in range(_DEEPEST):
        if below is None:
            return
        yield below
        below = _below(below)


def _below(fn: FunctionType) -> FunctionType | None:
    """Return the function that `fn` decorates, or None if there is none or it cannot be determined."""
    if _COMPILED in vars(fn):
        return None
    held = _held(fn)
    wrapped: object = vars(fn).get("__wrapped__")
    shown = next((function for function in held if function is wrapped), None)
    if shown is not None:
        return shown
    passes_all = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS  # the decorator does not use functools.wraps
    return held[0] if len(held) == 1 and fn.__code__.co_flags & passes_all == passes_all else None


def _held(fn: FunctionType) -> list[FunctionType]:
    """Return the functions in the closure of `fn`."""
    contents = [_content(cell) for cell in fn.__closure__ or ()]
    return [content for content in contents if isinstance(content, FunctionType)]


def _content(cell: CellType) -> object:
    try:
        contents: object = cell.cell_contents
    except ValueError:  # not assigned yet
        return None
    return contents


def _coroutine_in(path: list[FunctionType]) -> int:
    """Return the index of the first coroutine function, if no generator function is above it; else 0."""
    for at, fn in enumerate(path):
        if inspect.iscoroutinefunction(fn):
            return at
        if wrapping.is_generator(fn):
            break
    return 0


def _rebuilt(above: FunctionType, below: FunctionType, made: FunctionType) -> FunctionType:
    """Return a copy of `above`, with stepscope's metadata, that calls `made` in place of `below`."""
    copy = _holding(above, below, made)
    shown = vars(copy).get("__wrapped__")
    wrapping.wraps(above, copy, wrapping.declared(made))
    if shown is made:
        vars(copy)["__wrapped__"] = made
    return copy


def _holding(above: FunctionType, below: FunctionType, made: FunctionType) -> FunctionType:
    """Return a copy of `above` whose closure and `__wrapped__` have `made` in place of `below`."""
    closure = tuple(CellType(made) if _content(cell) is below else cell for cell in above.__closure__ or ())
    copy = FunctionType(above.__code__, above.__globals__, above.__name__, above.__defaults__, closure)
    copy.__kwdefaults__ = above.__kwdefaults__
    functools.update_wrapper(copy, above)
    del vars(copy)["__wrapped__"]
    vars(copy).update(vars(above))
    if vars(above).get("__wrapped__") is below:
        vars(copy)["__wrapped__"] = made
    return copy


def _looks_at_caller(path: list[FunctionType], at: int) -> bool:
    """Return whether the function at index `at` of `path`, or a function that it calls, inspects the frame of
    its caller.
    """
    if at == len(path) - 1:
        return _looks(path[at].__code__, path[at].__globals__)
    return any(_looks(fn.__code__, fn.__globals__) for fn in _read(path[at], path[at + 1], _READ))


def _read(fn: FunctionType, below: FunctionType, levels: int) -> Iterator[FunctionType]:
    """Yield `fn`, and the functions of its module that it calls or has in its closure, `levels` deep. Leave
    out `below`.
    """
    yield fn
    if levels == 0:
        return
    called = [*_held(fn), *(fn.__globals__.get(name) for name in fn.__code__.co_names)]
    for inner in called:
        if isinstance(inner, FunctionType) and inner is not below and inner.__globals__ is fn.__globals__:
            yield from _read(inner, below, levels - 1)


def _looks(code: CodeType, names: Mapping[str, object]) -> bool:
    """Return whether a code object accesses the frame of its caller."""
    if {"f_back", "getouterframes", "_getframemodulename"}.intersection(code.co_names):
        return True
    return bool({"_getframe", "stack"}.intersection(code.co_names)) and _asks(code, names)


def _asks(code: CodeType, names: Mapping[str, object]) -> bool:
    """Return whether a code object calls `inspect.stack`, or `sys._getframe` with an argument."""
    before, is_getting = None, False
    for instruction in dis.get_instructions(code):
        if is_getting and instruction.opname.startswith("CALL"):
            if instruction.arg:
                return True
            is_getting = False
        name = instruction.argval if isinstance(instruction.argval, str) else None
        if name == "stack" and (before == "inspect" or names.get("stack") is inspect.stack):
            return True
        is_getting = is_getting or name == "_getframe"
        before = name or before
    return False
