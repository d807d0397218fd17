"""One finding, and how it is shown."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

State: TypeAlias = Literal["green", "amber", "red", "absent"]
"""`green`: works. `amber`: works, with something to know. `red`: will not work. `absent`: not installed, and
nothing here needs it."""


_LONGEST = 1000


def _shown(text: str) -> str:
    """Return one printable line of limited length: a finding may hold bytes that are no text."""
    line = " ".join(text.split())
    clean = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
    return clean if len(clean) <= _LONGEST else f"{clean[:_LONGEST]}..."


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `stepscope doctor`."""

    subject: str
    """Subject: `torch`, `disk`."""
    state: State
    found: str
    """Finding, with its numbers."""
    fix: str | None = None
    """Remedy; every red row has one."""

    def __post_init__(self) -> None:
        for field in ("subject", "found", "fix"):
            text = getattr(self, field)
            if text is not None:
                msgspec.structs.force_setattr(self, field, _shown(text))
        if self.state == "red" and not self.fix:
            raise ValueError(f"the red row {self.subject!r} needs a fix")


def green(subject: str, finding: str) -> Row:
    return Row(subject=subject, state="green", found=finding)


def amber(subject: str, finding: str, fix: str) -> Row:
    return Row(subject=subject, state="amber", found=finding, fix=fix)


def red(subject: str, finding: str, fix: str) -> Row:
    return Row(subject=subject, state="red", found=finding, fix=fix)


def absent(subject: str, finding: str) -> Row:
    return Row(subject=subject, state="absent", found=finding)
