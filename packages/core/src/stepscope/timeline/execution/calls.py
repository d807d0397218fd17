"""Calls of functions in other processes, as JSON of the types in their annotations: nothing is unpickled.

A path travels as the system's bytes, which may be no UTF-8.
"""

from __future__ import annotations

import os
import traceback
from base64 import b64decode
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar, cast, get_type_hints

import msgspec

_T = TypeVar("_T")


def _sent(value: object) -> bytes:
    if not isinstance(value, Path):
        raise NotImplementedError(f"{type(value).__name__} cannot be sent")
    return os.fsencode(value)


def _received(kind: type[object], value: Any) -> object:
    return kind(os.fsdecode(b64decode(value))) if issubclass(kind, Path) else value


_encode = msgspec.json.Encoder(enc_hook=_sent).encode
_making = Lock()
"""msgspec reads the fields of a type when it is first used, and crashes if two threads do so at once."""


class WorkerDiedError(BrokenExecutor):
    """The process that ran a call ended without a result, or had no memory for it."""


class WorkerFailedError(RuntimeError):
    """A call raised an exception, whose traceback is the message."""


class _Call(msgspec.Struct):
    module: str
    name: str
    arguments: msgspec.Raw


class _Answer(msgspec.Struct):
    result: msgspec.Raw = msgspec.Raw(_encode(None))
    errno: int | None = None
    file: bytes | None = None
    """Of an `OSError`, like `errno`."""
    memory: bool = False
    """True: the call raised MemoryError."""
    traceback: str | None = None


def call_of(fn: Callable[..., object], args: tuple[object, ...]) -> bytes:
    """Return the text of a call of a function that a module has by name.

    Raises:
        UnicodeEncodeError: an argument is text that is no UTF-8.
    """
    return _encode(_Call(fn.__module__, fn.__qualname__, msgspec.Raw(_encode(args))))


def answer_to(text: bytes) -> bytes:
    """Do a call in this process, and return the text of its answer, an error too."""
    return _encode(_do(_decode(text, _Call)))


def result_of(text: bytes, fn: Callable[..., _T]) -> _T:
    """Return the result in an answer.

    Raises:
        WorkerDiedError: the call had too little memory.
        OSError: as the call did.
        WorkerFailedError: the call raised another error.
    """
    answer: _Answer = _decode(text, _Answer)
    if answer.memory:
        raise WorkerDiedError("its process had too little memory")
    if answer.errno is not None:
        name = None if answer.file is None else os.fsdecode(answer.file)
        raise OSError(answer.errno, os.strerror(answer.errno), name)
    if answer.traceback is not None:
        raise WorkerFailedError(answer.traceback)
    return cast(_T, _decode(answer.result, get_type_hints(fn)["return"]))


def _do(call: _Call) -> _Answer:
    try:
        fn = getattr(import_module(call.module), call.name)
        hints = get_type_hints(fn)
        types = tuple(kind for name, kind in hints.items() if name != "return")
        count = len(msgspec.json.decode(call.arguments))
        args = _decode(call.arguments, tuple[types[:count]])  # type: ignore[misc] # made here
        return _Answer(result=msgspec.Raw(_encode(fn(*args))))
    except MemoryError:
        return _Answer(memory=True)
    except OSError as error:
        file = None if error.filename is None else os.fsencode(error.filename)
        return _Answer(errno=error.errno, file=file, traceback=str(error))
    except Exception:
        return _Answer(traceback=traceback.format_exc())


def _decode(text: bytes | msgspec.Raw, kind: Any) -> Any:
    with _making:
        decoder = _decoder(kind)
    return decoder.decode(text)


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, dec_hook=_received)
