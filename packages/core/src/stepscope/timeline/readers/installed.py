"""The readers that are there: our own, and those of installed packages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

from stepscope.timeline.model import FileProblem
from stepscope.timeline.readers.contract import Claim, FoundFile, Reader

GROUP = "stepscope.readers"
_METHODS = ("claims", "open")


class Readers:
    """Asked in their order; `problems` names those that do not work."""

    def __init__(self, readers: Iterable[Reader] = ()) -> None:
        self._readers = list(readers)
        self.problems: list[FileProblem] = []

    @classmethod
    def installed(cls) -> Readers:
        """Packages' readers first, by name: they know their files better than we do."""
        from importlib.metadata import entry_points  # 15 ms, when there is a merge

        found = cls()
        for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
            try:
                reader = cast(Callable[[], Reader], point.load())()
                lacking = [name for name in _METHODS if not callable(getattr(reader, name, None))]
                if lacking:
                    raise TypeError(f"{type(reader).__qualname__} lacks {', '.join(lacking)}")
            except Exception as error:
                what = f"this reader ({point.value}) cannot be used: {reason(error)}"
                found.problems.append(FileProblem(file=f"{GROUP}: {point.name}", what=what))
            else:
                found._readers.append(reader)
        found._readers += _own()
        return found

    def claim(self, file: FoundFile) -> tuple[Reader, Claim] | tuple[None, None]:
        """Who knows it, and what it says of it."""
        for reader in self._readers:
            try:
                claim = reader.claims(file)
            except Exception as error:
                what = f"reader {reader.name!r} failed when asked about it: {reason(error)}"
                self.problems.append(FileProblem(file=file.name, what=what))
                continue
            if claim is not None:
                return reader, claim
        return None, None


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _own() -> Sequence[Reader]:
    from stepscope.timeline.readers.nsys import NsysReader  # sqlite3: when there is a merge

    return (NsysReader(),)
