"""The function `instrument`, which records functions of unedited code as the decorator `profile_step`
does.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, cast

from stepscope._recording.instrument import calls, step_boundaries
from stepscope._recording.instrument.call_arguments import Arguments, Condition
from stepscope._recording.instrument.calls import Timing
from stepscope._recording.instrument.fitting import fitted
from stepscope._recording.instrument.step_boundaries import Boundary
from stepscope._recording.process import failures
from stepscope._recording.process.identity import is_first
from stepscope._recording.spans import api, layers, wrapping
from stepscope._recording.spans.compiled import uncompiled
from stepscope._recording.spans.wrapping import Attrs
from stepscope.config._fields import closest
from stepscope.errors import ConfigError, ours
from stepscope.files import switch

_lock = threading.RLock()
_instruments: dict[str, Instrument] = {}
"""{`module:name`: handle that is installed or waits for the module's import}. One writer: this module."""
refusals: dict[str, str] = {}
"""{`module:name`: reason why the function could not be patched}. One writer: this module."""
missed: dict[str, str] = {}
"""{`instrument(...) of the preset ...`: reason} of preset entries that do not fit this process. Writers:
`note_failure`, `_note_lost`."""


class Patched(NamedTuple):
    """One replaced attribute."""

    parent: object
    attribute: str
    original: object
    replacement: object
    inherited: bool


class Instrument:
    """The handle of one instrumented function, which `instrument` returns."""

    def __init__(
        self,
        module: str,
        name: str,
        timings: Sequence[Timing],
        boundary: Boundary | None = None,
        origin: str = "",
    ) -> None:
        self.module = module
        self.name = name
        self.target = f"{module}:{name}"
        self.timings = tuple(timings)
        self.recorded = self.timings
        """`timings` as used, without paths to arguments that the function does not have (presets only)."""
        self.boundary = boundary
        self.origin = origin
        """Words for messages that name the preset of the entry; empty if there is none."""
        self._patched: list[Patched] = []
        self._redirected: list[tuple[FunctionType, FunctionType, FunctionType]] = []
        """(copy of the function in a subclass, the original that the copy calls, the new function).
        `@ray.remote` makes the copy."""

    @property
    def installed(self) -> bool:
        """True if the function is replaced now: its module is imported, and `remove` was not called."""
        return bool(self._patched)

    def remove(self) -> None:
        """Restore the original function, or stop waiting for its module. Idempotent."""
        with _lock:
            if _instruments.get(self.target) is self:
                del _instruments[self.target]
            for patched in list(self._patched):
                if inspect.getattr_static(patched.parent, patched.attribute, None) is not patched.replacement:
                    failures.warn("stepscope: %s was replaced again since, and stays as it is", self.target)
                    continue
                if patched.inherited:
                    delattr(patched.parent, patched.attribute)
                else:
                    setattr(patched.parent, patched.attribute, patched.original)
                self._patched.remove(patched)
            while self._redirected:
                caller, original, replacement = self._redirected.pop()
                layers.redirected(caller, replacement, original)

    def install(self, module: ModuleType) -> None:
        """Replace the function in its imported module.

        Raises:
            ConfigError: The function does not exist, or is already recorded.
            TypeError: The attribute is not a Python function.
        """
        parent, attribute = parent_of(module, self.name)
        self._replace(parent, attribute)
        refusals.pop(self.target, None)

    def install_on(self, cls: type) -> None:
        """Replace the method in the class of an object, such as a Ray actor, whose class is a copy of the
        class in the module.
        """
        attribute = self.name.rpartition(".")[2]
        for owner in reversed(cls.__mro__):
            member = vars(owner).get(attribute)
            # Methods of a copy may have been pickled separately from the class, so they are recognised by
            # name.
            named = {_name(owner) + f".{attribute}", _name(member)} if member is not None else ()
            if f"{self.module}.{self.name}" in named and not wrapping.is_replacement(member):
                self._replace(owner, attribute)

    def _replace(self, parent: object, attribute: str) -> None:
        import wrapt  # imported here: 54 ms, and few programs need it

        # getattr, because a lazy module loads attributes on access. Static for a class, to get the descriptor
        # itself.
        original = (
            getattr(parent, attribute)
            if isinstance(parent, ModuleType)
            else inspect.getattr_static(parent, attribute)
        )
        declared = wrapping.declared(original)
        if declared is not None and any(timing.kind in calls.SPANS for timing in self.timings):
            role = "" if declared.role is None else f"{declared.role}/"
            fix = f"nothing to do: it is recorded as {role}{declared.stage}"
            raise ConfigError("instrument()", self.target, "a function that is not timed yet", fix)
        replacement = self._replacement(original)
        inherited = attribute not in vars(parent)
        if inherited and isinstance(parent, type):
            # pickle finds a function by this name. The old name would lead to the function of the base class.
            made = cast(FunctionType, getattr(replacement, "__func__", replacement))
            made.__module__, made.__qualname__ = parent.__module__, f"{parent.__qualname__}.{attribute}"
        wrapt.apply_patch(parent, attribute, replacement)
        self._patched.append(Patched(parent, attribute, original, replacement, inherited))
        if isinstance(parent, type) and isinstance(original, FunctionType):
            for cls, copy in _copies(parent, attribute):
                if copy is original:
                    setattr(cls, attribute, replacement)
                    self._patched.append(Patched(cls, attribute, copy, replacement, False))
                elif layers.redirected(copy, original, cast(FunctionType, replacement)):
                    self._redirected.append((copy, original, cast(FunctionType, replacement)))

    def _replacement(self, original: object) -> object:
        if isinstance(original, (classmethod, staticmethod)):
            inner = cast(FunctionType, self._replacement(original.__func__))
            return type(original)(inner)
        made = layers.placed(api.function(original), self._recorded)
        wrapping.mark_replacement(made)
        return made

    def _recorded(self, fn: FunctionType) -> FunctionType:
        boundary = self.boundary
        if self.origin:
            self.recorded, boundary, lost = fitted(fn, self.timings, boundary, self.target)
            for path, error in lost.items():
                _note_lost(self, path, error)
        for layer in calls.LAYERS:
            timings = [timing for timing in self.recorded if timing.kind in layer]
            if timings:
                fn = _timed(fn, timings, self.target)
        return fn if boundary is None else step_boundaries.wrap(fn, boundary, self.target)

    def _imported(self, module: ModuleType) -> None:
        with _lock:
            if _instruments.get(self.target) is not self:
                return  # removed meanwhile
            try:
                self.install(module)
            except ours() as error:
                # The user's import must succeed, even if the function does not exist.
                del _instruments[self.target]
                note_failure(self, error)


def note_failure(handle: Instrument, error: Exception) -> None:
    """Log, once for each absent module, that a function is not recorded, and store the reason for the
    manifest.
    """
    is_absent = isinstance(error, ConfigError) and error.value == handle.module
    target = repr(handle.module) if is_absent else f"{handle.module!r}, {handle.name!r}"
    refusals[handle.target] = str(error)
    place = f"instrument({target}){handle.origin}"
    if handle.origin:
        missed[place] = failures.describe(error)
    # All processes that import the framework lack the same functions, so only the first process logs them. A
    # capture logs functions that other processes lack.
    failures.note(place, error, aloud=not handle.origin or is_first())


def _note_lost(handle: Instrument, path: str, error: ConfigError) -> None:
    """Log, as `note_failure` does, that an entry of a preset cannot read a path. The calls are still
    recorded.
    """
    place = f"{path!r} of instrument({handle.module!r}, {handle.name!r}){handle.origin}"
    missed[place] = failures.describe(error)
    failures.note(place, error, aloud=is_first())


def instrument(
    module: str, name: str, *, role: str, stage: str | None = None, attrs: Attrs | None = None
) -> Instrument:
    """Record calls of the function `name` (`"Class.method"`) of `module` as spans, from now on or from the
    module's import on.

    Code that has already imported the function (`from module import name`) keeps the original. Only this
    process is changed: with Ray, call this in the worker, or list the function under `instrument` in the
    configuration. A second call with the same arguments returns the same handle.

    Args:
        module: Dotted name of the module, which is not imported by this call.
        name: Dotted path of the function in the module.
        role: As for `profile_step`, but not None. `stage` and `attrs` are also as for `profile_step`.

    Raises:
        ConfigError: The module or function does not exist (the message lists the names), the function is
            already recorded, or an argument is wrong.
        TypeError: The named object is not a Python function.

    If the module is imported later and the name is wrong, this is logged, and the import succeeds. With
    STEPSCOPE_DISABLE=1, nothing is replaced.
    """
    api.check(role, stage, attrs)
    return place(Instrument(module, name, [Timing(role, stage, attrs, Condition({}, {}))]))


def place(handle: Instrument, *, early: bool = False) -> Instrument:
    """Install `handle`, now or at the import of its module, and return it. If an equal handle exists, return
    that handle.

    Args:
        early: True if `sys.path` may not be complete yet (at program start, in a Ray worker). An absent
            package is then not an error.

    Raises:
        ConfigError: as `instrument`.
        TypeError: as `instrument`.
    """
    if switch.DISABLED:
        return handle
    with _lock:
        known = _instruments.get(handle.target)
        if known is not None:
            if same(known, handle):
                return known
            allowed = "one role, stage and attrs per function"
            raise ConfigError("instrument()", handle.target, allowed, "remove() the first handle")
        loaded = sys.modules.get(handle.module)
        if loaded is not None:
            handle.install(loaded)
        else:
            check_importable(handle.module, early=early)
        _instruments[handle.target] = handle
    if loaded is None:
        when_imported(handle.module, handle._imported)
    return handle


def when_imported(module: str, hook: Callable[[ModuleType], None]) -> None:
    """Call `hook(module)` when `module` is imported, or at once if it is imported already."""
    import wrapt  # imported here: 54 ms

    wrapt.register_post_import_hook(hook, module)


def same(one: Instrument, other: Instrument) -> bool:
    """Return whether both handles record a function in the same way."""
    return (one.timings, one.boundary) == (other.timings, other.boundary)


def _timed(fn: FunctionType, timings: Sequence[Timing], target: str) -> FunctionType:
    """Return a wrapper of `fn`. Each call is recorded by the first of `timings` whose condition it meets. All
    timings belong to one layer.
    """
    versions = [(timing.condition, calls.wrap(fn, timing, target)) for timing in timings]
    if versions[0][0].any_call:
        return versions[0][1]
    if wrapping.is_generator(fn):
        raise TypeError(f"{target} is a generator: `where` and `same` tell calls of plain functions apart")
    arguments = Arguments(fn)
    for condition, _ in versions:
        condition.check(arguments, target)

    @uncompiled
    def version(args: tuple[object, ...], kwargs: dict[str, object]) -> Callable[..., Any]:
        return next((timed for condition, timed in versions if condition.holds(arguments, args, kwargs)), fn)

    made = wrapping.calling(fn, _CHOICE, "", calls.is_always(timings), version=version)
    # The declared role is kept, because `decorated_roles` reads it from the method.
    return wrapping.wraps(fn, made, wrapping.declared(versions[0][1]))


_CHOICE = """
{async_}def wrapper({params}):
    if __is_off():
        try:
            return {await_}__fn({call})
        except BaseException:
            raise
    return {await_}__version(({args}), {{{kwargs}}})({call})
"""


def parent_of(module: ModuleType, name: str) -> tuple[object, str]:
    """Return the class or module that has the attribute `name`, and the last part of `name`."""
    *path, attribute = name.split(".")
    parent: object = module
    for at, part in enumerate(path):
        if not hasattr(parent, part):
            raise _missing(module, name, parent, path[:at])
        parent = _original_class(getattr(parent, part))
    if not hasattr(parent, attribute):
        raise _missing(module, name, parent, path)
    return parent, attribute


def _original_class(owner: object) -> object:
    """Return the class behind `@ray.remote`, which Ray sends to the actors."""
    hidden = getattr(owner, "__ray_metadata__", None)
    return owner if hidden is None else hidden.modified_class.__ray_actor_class__


def _name(thing: object) -> str:
    return f"{getattr(thing, '__module__', None)}.{getattr(thing, '__qualname__', None)}"


def _copies(cls: type, attribute: str) -> Iterator[tuple[type, FunctionType]]:
    """Yield (subclass, function) for each subclass of `cls` that defines a function `attribute`.

    `@ray.remote` makes a subclass with a decorated copy of each method, also of inherited methods. The copies
    call the original functions.
    """
    subclasses: list[type] = type.__subclasses__(cls)
    for below in subclasses:
        own = vars(below).get(attribute)
        if isinstance(own, FunctionType):
            yield below, own
        yield from _copies(below, attribute)


def check_importable(module: str, *, early: bool = False) -> None:
    """Raise `ConfigError` if `module` cannot be found. With `early`, an absent top-level package is not an
    error.
    """
    absent = absent_part(module)
    if absent is not None:
        package, _, below = absent.rpartition(".")
        if early and not package:
            return
        fix = (
            f"correct the name: there is no {below!r} in {package}"
            if package
            else f"install {absent!r}, or correct the name"
        )
        raise ConfigError("instrument()", module, "a module that can be imported", fix)


def absent_part(module: str) -> str | None:
    """Return the first part of a dotted module name that cannot be found, or None. Nothing is imported."""
    first, *rest = module.split(".")
    if not first:
        return module
    spec = None if first in sys.modules else find_spec(first)
    if spec is None and first not in sys.modules:
        return first
    folders = (
        getattr(sys.modules[first], "__path__", None) if spec is None else spec.submodule_search_locations
    )
    dotted = first
    for part in rest:
        dotted = f"{dotted}.{part}"
        if dotted in sys.modules:
            folders = getattr(sys.modules[dotted], "__path__", None)
            continue
        try:
            part_spec = None if folders is None else PathFinder.find_spec(dotted, list(folders))
        except KeyError:  # the spec of a folder without __init__.py needs its parent
            folders = [os.path.join(folder, part) for folder in folders or ()]
            continue
        if part_spec is None:
            return dotted
        folders = part_spec.submodule_search_locations
    return None


def _missing(module: ModuleType, name: str, parent: object, path: Sequence[str]) -> ConfigError:
    """Return the error for a dotted name that does not exist. Its beginning `path` exists, and leads to
    `parent`.
    """
    keys = [key for key in dir(parent) if not key.startswith("__") and _can_be_timed(parent, key)]
    names = [".".join((*path, key)) for key in keys]
    near = closest(name, names)
    fix = "use one of these" if names else "correct the module"
    if module.__name__ == "__main__":
        fix = (
            "a script's functions do not exist yet when they are looked up, and never in its workers. Move "
            "them into a module that it imports, or mark them with profile_step"
        )
    return ConfigError(
        "instrument()",
        f"{module.__name__}:{name}",
        ", ".join(names[:20] + ["..."] * (len(names) > 20)) or "nothing: the module has no function",
        f"did you mean {near!r}?" if near else fix,
    )


def _can_be_timed(parent: object, key: str) -> bool:
    # getattr_static, because lazy modules import on attribute access.
    member = inspect.getattr_static(parent, key, None)
    return isinstance(member, (FunctionType, classmethod, staticmethod, type))
