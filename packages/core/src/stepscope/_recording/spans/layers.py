"""The place of a wrapper among the decorators of a function: one at which no decorator notices the wrapper.

A decorator may inspect the frame of its caller: verl's `auto_await` returns a coroutine if its caller is a
coroutine, else the awaited result. Such a decorator is rebuilt around the wrapper, so that its caller stays
the same. A plain function above an `async def` is rebuilt too, because the duration of its call is not that
of the coroutine that it returns.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType

from stepscope._recording.spans import wrapping

_COMPILED = "_torchdynamo_orig_callable"
"""The attribute of torch.compile's result that holds the function to compile."""
_DEEPEST = 50
_READ = 3
"""Depth of calls inside a decorator's module up to which code is inspected along with the decorator."""


def placed(fn: FunctionType, wrap: Callable[[FunctionType], FunctionType]) -> FunctionType:
    """Return `fn` with `wrap` applied, to `fn` itself or below those of its decorators that would notice the
    wrapper.

    Raises:
        TypeError: `fn` inspects the frame of its caller, and is not a decorator with a function below it.
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
    """Make `fn`, or the decorator below it that calls `old`, call `new` instead. Return False if no function
    calls `old`.

    The function itself is changed, not copied: Ray holds `fn` in the class and in a table of methods, and
    pickles both by value. `old`, whose name now finds `new`, would go along with the globals of its module.
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
    """Yield a function, then the function that each yielded one calls below it."""
    below: FunctionType | None = fn
    for _ in range(_DEEPEST):
        if below is None:
            return
        yield below
        below = _below(below)


def _below(fn: FunctionType) -> FunctionType | None:
    """Return the function that `fn` decorates, or None if there is none, or if `fn` does not show which."""
    if _COMPILED in vars(fn):
        return None
    held = _held(fn)
    wrapped: object = vars(fn).get("__wrapped__")
    shown = next((function for function in held if function is wrapped), None)
    if shown is not None:
        return shown
    passes_all = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS  # a decorator without functools.wraps
    return held[0] if len(held) == 1 and fn.__code__.co_flags & passes_all == passes_all else None


def _held(fn: FunctionType) -> list[FunctionType]:
    """Return the functions that the closure of `fn` holds."""
    contents = [_content(cell) for cell in fn.__closure__ or ()]
    return [content for content in contents if isinstance(content, FunctionType)]


def _content(cell: CellType) -> object:
    try:
        contents: object = cell.cell_contents
    except ValueError:  # empty: it is not assigned yet
        return None
    return contents


def _coroutine_in(path: list[FunctionType]) -> int:
    """Return the index of the first coroutine function if all above it are plain; else 0."""
    for at, fn in enumerate(path):
        if inspect.iscoroutinefunction(fn):
            return at
        if wrapping.is_generator(fn):
            break
    return 0


def _rebuilt(above: FunctionType, below: FunctionType, made: FunctionType) -> FunctionType:
    """Return a copy of the wrapper `above` that calls `made` in place of `below`."""
    copy = _holding(above, below, made)
    shown = vars(copy).get("__wrapped__")
    wrapping.wraps(above, copy, wrapping.declared(made))
    if shown is made:
        vars(copy)["__wrapped__"] = made
    return copy


def _holding(above: FunctionType, below: FunctionType, made: FunctionType) -> FunctionType:
    """Return a copy of `above` with `made` in place of `below`."""
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
    """Return whether the function at index `at` of `path` inspects its caller, or calls a function that
    does.
    """
    if at == len(path) - 1:
        return _looks(path[at].__code__, path[at].__globals__)
    return any(_looks(fn.__code__, fn.__globals__) for fn in _read(path[at], path[at + 1], _READ))


def _read(fn: FunctionType, below: FunctionType, levels: int) -> Iterator[FunctionType]:
    """Yield `fn` and the functions of its closure and module that it calls, without the decorated one."""
    yield fn
    if levels == 0:
        return
    called = [*_held(fn), *(fn.__globals__.get(name) for name in fn.__code__.co_names)]
    for inner in called:
        if isinstance(inner, FunctionType) and inner is not below and inner.__globals__ is fn.__globals__:
            yield from _read(inner, below, levels - 1)


def _looks(code: CodeType, names: Mapping[str, object]) -> bool:
    """Return True if a code object accesses the frame of its caller."""
    if {"f_back", "getouterframes", "_getframemodulename"}.intersection(code.co_names):
        return True
    return bool({"_getframe", "stack"}.intersection(code.co_names)) and _asks(code, names)


def _asks(code: CodeType, names: Mapping[str, object]) -> bool:
    """Return True if a code object calls `inspect.stack`, or `sys._getframe` with a number."""
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
