"""Splitting of a JSON array into its elements, as bytes. The text comes in pieces and may be damaged.

msgspec checks each piece, at 1,000 MB/s. A piece of sound JSON is passed on as a whole. Only other pieces are
searched for strings and brackets, element by element.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import msgspec

from stepscope_report.timeline.readers.contract import Notes

LONGEST = 8 << 20
"""Largest plausible size in bytes of an element, or of the text around the array."""
_CANDIDATES = 256
"""Number of braces, from the end of a piece, that are tried as the start of an element."""
_SPARE = 100
"""Number of brackets added around an element when it is checked, so that it can also be decoded at a greater
depth of calls: msgspec limits the sum of calls and brackets."""
BARREN = 2 * LONGEST
"""Number of bytes without an event after which the search ends."""
_REACH = 4
"""Limit on the search beyond parts that are no JSON, as a multiple of the size of the damaged text."""
_OVERLAP = 256
"""Bytes kept of an abandoned element, to find the start of the next event."""
NO_JSON = "events that are no JSON"
REPAIRED = "events repaired: bad UTF-8, NaN, or escapes that JSON does not have"

TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["{}\[\]]', re.DOTALL)
_BLANK = b" \t\r\n,"
_BRACE = ord("{")
_SOMETHING = re.compile(rb"[^ \t\r\n,]")
_BETWEEN = re.compile(rb"\}\s*,\s*\Z")
EVENT = re.compile(rb'\{\s*"(?:ph|name|cat|pid|tid|ts)"\s*:')
BOUNDARY = re.compile(rb"\}\s*,\s*(?=%b)" % EVENT.pattern)
"""Text between two events. Arguments may look like events as well."""
_STRING_OR_NUMBER = re.compile(
    rb'"[^"\\]*(?:\\.[^"\\]*)*"|[-+]?\b(?:nan|inf(?:inity)?)\b', re.DOTALL | re.IGNORECASE
)
_ESCAPE = re.compile(
    rb'(\\(?:["\\/bfnrt]|ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}|u(?!d[89a-f])[0-9a-f]{4}))'
    rb"|(\\ud[89a-f][0-9a-f]{2})|([\x00-\x1f])|\\",
    re.IGNORECASE,
)
"""Groups: sound JSON (1), half a surrogate pair (2), a control character (3), a backslash without a valid
escape."""
raw_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
"""Decoder of an array into undecoded elements."""
T = TypeVar("T")


class Elements(Generic[T]):
    """Splits the text of an array into its elements. Feed it the text from behind the `[` on.

    Reading takes linear time, whatever the text is. Text that is no sound JSON is split where events seem to
    begin. Brackets are counted only in a part that is still no JSON. The search beyond such a part is limited
    to a multiple of the text's size. An element without an end is looked at again each time its text has
    doubled, and given up at `LONGEST`.
    """

    def __init__(self, notes: Notes, parse: Callable[[bytes], T]) -> None:
        """
        Args:
            parse: Converts some elements, an array in sound UTF-8. It raises `DecodeError` only for text that
                is no JSON.
        """
        self._parse = parse
        self.trailer: bytes | None = None
        """The text behind the array's end, or None if its end was not seen."""
        self._notes = notes
        self._rest = b""
        self._enough = 0
        """Number of bytes of text below which it is too early to look at `_rest` again."""
        self._barren = 0
        """Number of bytes since the last event."""
        self._astray = False
        """True if the text continues inside an element that was given up."""

    @property
    def given_up(self) -> bool:
        """True if so much text held no event that the rest is ignored."""
        return self.trailer is None and self._barren > BARREN

    def feed(self, block: bytes) -> Iterator[T]:
        """Yield the elements that end in this block, in batches."""
        self._barren += len(block)
        for batch in self._elements(block):
            self._barren = 0
            yield batch

    def _elements(self, block: bytes) -> Iterator[T]:
        if self.trailer is not None:
            if len(self.trailer) < LONGEST:
                self.trailer += block
            return
        if len(self._rest) + len(block) < self._enough:
            self._rest += block
            return
        self._enough = 0
        cut = 0 if self._astray else last_boundary(block)
        if not cut:
            self._rest, block = b"", self._rest + block
            cut = 0 if self._astray else last_boundary(block)
        some = b"".join((b"[", self._rest, memoryview(block)[:cut], b"]"))  # `memoryview` saves a copy
        batch = _sound(some, self._parse) if cut else None
        if batch is not None:
            self._rest = block[cut:].lstrip(_BLANK)
            yield batch
            return
        text = self._rest + block
        if len(text) >= LONGEST or cut or self._astray:
            yield from self._recover(text, last=False)
        else:
            self._rest = text

    def end(self) -> Iterator[T]:
        """Yield the elements that are left at the end of the text."""
        if self.trailer is None:
            yield from self._recover(self._rest, last=True)

    def _recover(self, text: bytes, *, last: bool) -> Iterator[T]:
        """Yield the sound elements of damaged text, at most one batch. A last part that may continue is
        kept.
        """
        self._rest = b""
        sound: list[bytes] = []
        at, credit = 0, _REACH * len(text)
        for bound in [*(match.end() for match in BOUNDARY.finditer(text)), len(text)]:
            if self._astray and bound < len(text):
                self._astray, at = False, bound
            if at >= bound or self._astray:
                continue  # inside an element that did not end where it seemed to, or that was given up
            part = text[at:bound].strip(_BLANK)
            if part.startswith(b"{") and self._is_sound(part) and _are_objects(part):
                sound.append(part)
                at = bound
                continue
            at, reached = self._walk(text, at, bound, min(len(text), bound + credit), last, sound)
            credit -= reached - bound
        if self._astray and not last:
            self._rest = text[-_OVERLAP:]
        if sound:
            yield self._parse(array_of(sound))

    def _walk(
        self, text: bytes, at: int, bound: int, limit: int, last: bool, sound: list[bytes]
    ) -> tuple[int, int]:
        """Find the elements of a part by strings and brackets, and add the sound ones to `sound`.

        Args:
            bound: The end of the part. Events follow, unless this is the end of the text.
            limit: The offset before which an element has to end.

        Returns:
            The offset at which to continue, and the offset up to which the text was searched.
        """
        is_final = bound == len(text)
        reached = bound
        while _SOMETHING.search(text, at, bound):
            start, end, closed = _element(text, at, limit)
            reached = max(reached, end or limit)
            if end is not None and text[at:start].strip(_BLANK):
                self._notes.events(NO_JSON)  # for example the zeros of a disk that was full
            if closed and is_final:
                self.trailer = text[end:]
                break
            if end is None and self._may_go_on(text, start, limit, last, is_final):
                return len(text), reached
            if end is None or closed:
                self._notes.events(NO_JSON)
                self._astray = is_final and not last
                break
            element = self._checked(text[start:end]) if text[start] == _BRACE else b""
            if element:
                sound.append(element)
            else:
                self._notes.events(NO_JSON)
                if end > bound:
                    break
            at = end
        return max(at, bound), reached

    def _may_go_on(self, text: bytes, start: int, limit: int, last: bool, is_final: bool) -> bool:
        """Keep the text from `start` on for the next block if an element may begin there and end later.
        Return whether the text was kept.
        """
        size = len(text) - start
        begins = text[start : start + 1] in (b"{", b"[", b'"')
        if last or size >= LONGEST or limit < len(text) or not (is_final or begins):
            return False
        if not is_final and len(text) >= LONGEST:
            return False  # no element is longer than this, so it is not an element
        self._rest = text[start:]
        self._enough = min(2 * size, LONGEST)
        return True

    def _is_sound(self, part: bytes) -> bool:
        return _sound(_deeper(part), raw_elements) is not None

    def _checked(self, element: bytes) -> bytes:
        """Return the element, repaired if that makes it sound JSON, else empty bytes."""
        if self._is_sound(element):
            return element
        mended = mend(element)
        if not self._is_sound(mended):
            return b""
        self._notes.events(REPAIRED)
        return mended


def _are_objects(part: bytes) -> bool:
    return all(bytes(element).startswith(b"{") for element in raw_elements(array_of([part])))


def _deeper(element: bytes) -> bytes:
    """Wrap an element in brackets, to make sure that a later reader at a greater depth has enough stack."""
    return b"[" * _SPARE + element + b"]" * _SPARE


def array_of(elements: Iterable[bytes | msgspec.Raw]) -> bytes:
    return b"[%b]" % b",\n".join(elements)


def mend(text: bytes) -> bytes:
    """Repair common mistakes of writers: bad UTF-8, NaN, raw control characters, bad escapes.

    Bytes that are no UTF-8 become U+FFFD; NaN and the infinities become null.
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
    """Return the offset behind the last comma that seems to separate two objects, or 0 if there is none."""
    at = text.rfind(b"{")
    for _ in range(_CANDIDATES):
        if at <= 0:
            break
        match = _BETWEEN.search(text[max(0, at - 64) : at])
        if match is not None:
            return max(0, at - 64) + match.start() + 1
        at = text.rfind(b"{", 0, at)
    return 0


def _element(text: bytes, at: int, limit: int) -> tuple[int, int | None, bool]:
    """Return (start, end, whether the array ends there) of the next element. `end` is None if the element
    does not end before `limit`."""
    depth = start = 0
    for token in TOKEN.finditer(text, at, limit):
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
