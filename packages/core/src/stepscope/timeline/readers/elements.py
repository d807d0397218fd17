"""The elements of a JSON array, as bytes, out of text that comes in pieces and may be damaged.

A piece of sound JSON is taken whole: msgspec checks it, at 1,000 MB/s. Only a piece that it refuses is walked
through by its strings and brackets, element by element.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import msgspec

from stepscope.timeline.readers.blocks import Notes

LONGEST = 8 << 20
"""Bytes of an element, or of what stands around the array, beyond which we stop believing in it."""
_CANDIDATES = 256
"""Braces that are looked at, from the end of a piece, for one that begins an element."""
_SPARE = 100
"""Calls, each of which msgspec counts as it counts a bracket."""
NO_JSON = "events that are no JSON"
MENDED = "events mended: bad UTF-8, NaN, or escapes that JSON does not have"

TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["{}\[\]]', re.DOTALL)
_BLANK = b" \t\r\n,"
_BETWEEN = re.compile(rb"\}\s*,\s*\Z")
EVENT = re.compile(rb'\{\s*"(?:ph|name|cat|pid|tid|ts)"\s*:')
_STRING_OR_NUMBER = re.compile(
    rb'"[^"\\]*(?:\\.[^"\\]*)*"|[-+]?\b(?:nan|inf(?:inity)?)\b', re.DOTALL | re.IGNORECASE
)
_ESCAPE = re.compile(
    rb'(\\(?:["\\/bfnrt]|ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}|u(?!d[89a-f])[0-9a-f]{4}))'
    rb"|(\\ud[89a-f][0-9a-f]{2})|([\x00-\x1f])|\\",
    re.IGNORECASE,
)
"""What JSON has (1), half a surrogate pair (2), a control character (3), a backslash that escapes nothing."""
raw_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
"""The elements of an array, for those who look into them later, if at all."""
T = TypeVar("T")


class Elements(Generic[T]):
    """Feed it the text from behind the `[` on; it hands out elements and stops behind the `]`."""

    def __init__(self, notes: Notes, parse: Callable[[bytes], T]) -> None:
        """
        Args:
            parse: Makes something of some elements, an array in sound UTF-8. It raises `DecodeError` for what
                is no JSON, and for nothing else.
        """
        self._parse = parse
        self.trailer: bytes | None = None
        """What stands behind the array's end. None: its end was not seen."""
        self._notes = notes
        self._rest = b""

    def feed(self, block: bytes) -> Iterator[T]:
        if self.trailer is not None:
            if len(self.trailer) < LONGEST:
                self.trailer += block
            return
        cut = last_boundary(block)
        if not cut:
            self._rest, block = b"", self._rest + block
            cut = last_boundary(block)
        some = b"".join((b"[", self._rest, memoryview(block)[:cut], b"]"))  # without another copy of them
        batch = _sound(some, self._parse) if cut else None
        if batch is not None:
            self._rest = block[cut:].lstrip(_BLANK)
            yield batch
            return
        text = self._rest + block
        if len(text) >= LONGEST or cut:
            yield from self._walk(text, last=False)
        else:
            self._rest = text

    def end(self) -> Iterator[T]:
        """The text is over: what is left of it."""
        if self.trailer is None:
            yield from self._walk(self._rest, last=True)

    def _walk(self, text: bytes, *, last: bool) -> Iterator[T]:
        """Element by element. One that is no JSON costs itself: the search goes on at the next event."""
        found: list[bytes] = []
        at = 0
        while True:
            start, end, closed = _element(text, at)
            if (closed or end is not None) and text[at:start].strip(_BLANK):
                self._notes.events(NO_JSON)  # zeros of a disk that was full, say
            if closed:
                self.trailer = text[end:]
                break
            element = b"" if end is None else self._checked(text[start:end])
            if element:
                found.append(element)
                at = end or start
                continue
            if end is None and not last and len(text) - start < LONGEST:
                self._rest = text[start:]
                break
            if not text[start:].strip(_BLANK):
                break
            self._notes.events(NO_JSON)
            following = EVENT.search(text, start + 1)
            if following is None:
                self._rest = b""
                break
            at = following.start()
        if found:
            yield self._parse(array_of(found))

    def _checked(self, element: bytes) -> bytes:
        """The element, mended where that helps; nothing where it does not."""
        if _sound(_deeper(element), raw_elements) is not None:
            return element
        mended = mend(element)
        if _sound(_deeper(mended), raw_elements) is None:
            return b""
        self._notes.events(MENDED)
        return mended


def _deeper(element: bytes) -> bytes:
    """So that who reads it from some calls further down does not run out of stack."""
    return b"[" * _SPARE + element + b"]" * _SPARE


def array_of(elements: Iterable[bytes | msgspec.Raw]) -> bytes:
    return b"[%b]" % b",\n".join(elements)


def mend(text: bytes) -> bytes:
    """JSON out of what careless writers make of it: bad UTF-8, NaN, raw control characters, bad escapes.

    What is no UTF-8 becomes U+FFFD, NaN and the infinities become null.
    """
    return _STRING_OR_NUMBER.sub(_mended, text.decode(errors="replace").encode())


def _mended(match: re.Match[bytes]) -> bytes:
    token = match[0]
    return _ESCAPE.sub(_escaped, token) if token.startswith(b'"') else b"null"


def _escaped(match: re.Match[bytes]) -> bytes:
    if match[1]:
        return match[1]
    if match[2]:
        return b"\\ufffd"
    return b"\\u%04x" % match[3][0] if match[3] else b"\\\\"


def _sound(text: bytes, parse: Callable[[bytes], T]) -> T | None:
    try:
        if not text.isascii():
            text.decode()
        return parse(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def last_boundary(text: bytes) -> int:
    """Behind the last comma that seems to stand between two objects; 0 where there is none."""
    at = text.rfind(b"{")
    for _ in range(_CANDIDATES):
        if at <= 0:
            break
        match = _BETWEEN.search(text[max(0, at - 64) : at])
        if match is not None:
            return max(0, at - 64) + match.start() + 1
        at = text.rfind(b"{", 0, at)
    return 0


def _element(text: bytes, at: int) -> tuple[int, int | None, bool]:
    """(start, end, whether the array ends there) of the next element. End None: it does not end in `text`."""
    depth = start = 0
    for token in TOKEN.finditer(text, at):
        mark = text[token.start()]
        if depth == 0:
            start = token.start()
        if mark in b"{[":
            depth += 1
        elif mark in b"}]":
            if depth == 0:
                return start, token.end(), True
            depth -= 1
        elif token.end() - token.start() == 1:
            return start, None, False  # a quote that opens a string without an end
        if depth == 0:
            return start, token.end(), False
    return (start if depth else at), None, False
