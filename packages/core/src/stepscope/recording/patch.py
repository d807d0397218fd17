"""`instrument`: times functions of code that one cannot edit, as `profile_step` would."""

from __future__ import annotations

import inspect
import sys
import threading
from types import FunctionType, ModuleType

from stepscope.errors import ConfigError
from stepscope.recording import decorator, guard
from stepscope.recording.wrappers import Attrs

_lock = threading.RLock()
_instruments: dict[tuple[str, str], Instrument] = {}
"""(module, name) -> what is installed there, or waits for the import. Written by this module alone."""


class Instrument:
    """The handle of one instrumented function. Made by `instrument`."""

    def __init__(self, module: str, name: str, role: str, stage: str | None, attrs: Attrs | None) -> None:
        self.module = module
        self.name = name
        self.installed = False
        """Whether the function is replaced: not before its module is imported, and not after `remove`."""
        self._declared = (role, stage, attrs)

    def remove(self) -> None:
        """Puts the original back, or cancels the wait for the module. Idempotent."""
        with _lock:
            if _instruments.get((self.module, self.name)) is self:
                del _instruments[self.module, self.name]
            if not self.installed:
                return
            if inspect.getattr_static(self._parent, self._attribute, None) is not self._replacement:
                guard.warn("stepscope: %s was replaced again since, and stays as it is", self._target)
                return
            if self._inherited:
                delattr(self._parent, self._attribute)
            else:
                setattr(self._parent, self._attribute, self._original)
            self.installed = False

    @property
    def _target(self) -> str:
        return f"{self.module}:{self.name}"

    def _install(self, module: ModuleType) -> None:
        import wrapt  # 54 ms, and few programs come here

        try:
            self._parent, self._attribute, self._original = wrapt.resolve_path(module, self.name)
        except AttributeError:
            raise _missing(module, self.name) from None
        declared = getattr(getattr(self._original, "__func__", self._original), "__stepscope__", None)
        if declared is not None:
            fix = f"nothing to do: it is recorded as {declared.role}/{declared.stage}"
            raise ConfigError("instrument()", self._target, "a function that is not timed yet", fix)
        role, stage, attrs = self._declared
        self._replacement = decorator.timed(self._original, role=role, stage=stage, attrs=attrs)
        self._inherited = self._attribute not in vars(self._parent)
        wrapt.apply_patch(self._parent, self._attribute, self._replacement)
        self.installed = True

    def _imported(self, module: ModuleType) -> None:
        with _lock:
            if _instruments.get((self.module, self.name)) is not self:
                return  # removed while it waited
            try:
                self._install(module)
            except Exception as error:
                # The import is the user's: it succeeds, whatever we do not find in the module.
                del _instruments[self.module, self.name]
                guard.note(f"instrument({self.module!r}, {self.name!r})", error)


def instrument(
    module: str, name: str, *, role: str, stage: str | None = None, attrs: Attrs | None = None
) -> Instrument:
    """Times the function `name` (`"Class.method"`) of `module`: now, or once the module is imported.

    Whoever fetched it before (`from module import name`) keeps the untimed one. Only this process changes:
    with Ray, call it in the worker. The same call again returns the same handle.

    Args:
        module: Dotted name. It is not imported here.
        name: Dotted path inside the module.
        role: As for `profile_step`, and so are `stage` and `attrs`.

    Raises:
        ConfigError: no such module or name (says what there is), it is timed already, or a wrong argument.
        TypeError: it is not a Python function.

    What is wrong with a name in a module that is imported later is logged then; the import succeeds. With
    STEPSCOPE_DISABLE=1 nothing is ever replaced.
    """
    decorator.check(role, stage, attrs)
    handle = Instrument(module, name, role, stage, attrs)
    if decorator.DISABLED:
        return handle
    with _lock:
        known = _instruments.get((module, name))
        if known is not None:
            if known._declared == handle._declared:
                return known
            allowed = "one role, stage and attrs per function"
            raise ConfigError("instrument()", handle._target, allowed, "remove() the first handle")
        loaded = sys.modules.get(module)
        if loaded is not None:
            handle._install(loaded)
        else:
            _check_importable(module)
        _instruments[module, name] = handle
    if loaded is None:
        import wrapt

        wrapt.register_post_import_hook(handle._imported, module)
    return handle


def _check_importable(module: str) -> None:
    # Only its package: to find a submodule would import what is above it.
    from importlib.util import find_spec

    package = module.partition(".")[0]
    if package not in sys.modules and (not package or find_spec(package) is None):
        fix = f"install {package!r}, or correct the name"
        raise ConfigError("instrument()", module, "a module that can be imported", fix)


def _missing(module: ModuleType, name: str) -> ConfigError:
    import difflib

    parent: object = module
    path = ""
    for part in name.split("."):
        if not hasattr(parent, part):
            break
        parent, path = getattr(parent, part), f"{path}{part}."
    there = [f"{path}{key}" for key in dir(parent) if not key.startswith("__") and _can_be_timed(parent, key)]
    close = difflib.get_close_matches(name, there, n=1)
    return ConfigError(
        "instrument()",
        f"{module.__name__}:{name}",
        ", ".join(there[:20] + ["..."] * (len(there) > 20)) or "nothing: there is no function",
        f"did you mean {close[0]!r}?" if close else "take one of these",
    )


def _can_be_timed(parent: object, key: str) -> bool:
    # getattr_static: lazy modules import what they are asked for.
    found = inspect.getattr_static(parent, key, None)
    return isinstance(found, (FunctionType, classmethod, staticmethod, type))
