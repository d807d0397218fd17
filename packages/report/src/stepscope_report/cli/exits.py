"""Exit codes of the command."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes, the same for every command."""

    OK = 0
    ERROR = 1
    """Something went wrong while the command ran."""
    USAGE = 2
    """The command line or the configuration is wrong."""
    INCOMPLETE = 3
    """The command worked, but a part of the data is missing, broken or was left out."""
    UNCAPTURED = 4
    """`run --require-capture`: the program succeeded, and no step of it was captured."""
    UNDECIDED = 5
    """`diff --require-verdict`: nothing failed, and the steps are too few or too uneven to tell."""


class CommandError(Exception):
    """Ends the command with a message on stderr. No traceback: the message says all."""

    def __init__(self, message: str, code: Exit = Exit.USAGE) -> None:
        super().__init__(message)
        self.code = code
