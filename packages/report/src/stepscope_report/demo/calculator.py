"""The tool of the demo: a calculator in its own process. Each question, and each answer, is one line in a
pipe.

`Calculator` is the client. As a script, this file is the calculator itself.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from asyncio.subprocess import PIPE
from types import TracebackType

_EXPRESSION = re.compile(r"(\d+)([+-])(\d+)", re.ASCII)


def evaluate(expression: str) -> str:
    """Return the value of `number + number` or `number - number` as text, or `!` for any other text."""
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        return "!"
    return str(int(match[1]) + int(match[2] + match[3]))


class Calculator:
    """Async context manager that starts the calculator's process and ends it."""

    async def __aenter__(self) -> Calculator:
        self._one_at_a_time = asyncio.Lock()
        # -I -S: only the standard library, and nothing from this process' environment
        command = (sys.executable, "-I", "-S", __file__)
        self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()  # the process ends when its input does
        await self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, expression: str) -> str:
        """Return the value of `expression` as text, or `!` if it is invalid.

        Raises:
            RuntimeError: the process has ended.
        """
        async with self._one_at_a_time:
            answer = await self._exchange(expression.encode() + b"\n")
        if not answer:
            raise RuntimeError(f"the calculator (pid {self.pid}) is gone")
        return answer.decode().rstrip()

    async def _exchange(self, line: bytes) -> bytes:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None or stdin.is_closing():
            return b""
        stdin.write(line)
        try:
            return await stdout.readline()
        except asyncio.CancelledError:
            stdin.close()  # else the next question would get this answer
            raise


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the client, which ends this process
    for line in sys.stdin:
        sys.stdout.write(evaluate(line.rstrip("\n")) + "\n")
        sys.stdout.flush()
