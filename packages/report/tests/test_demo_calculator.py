"""The demo's tool: a process that computes, refuses, and ends."""

from __future__ import annotations

import asyncio
import os

import pytest

from stepscope_report.demo.calculator import Calculator


async def test_it_computes_in_another_process() -> None:
    async with Calculator() as calculator:
        assert await calculator.ask("8+5") == "13"
        assert await calculator.ask("5-8") == "-3"
        assert calculator.pid != os.getpid()


@pytest.mark.slow
@pytest.mark.parametrize("expression", ["", "8+", "8*5", "-3+5", "8+5+1", "__import__('os')", "८+५"])
async def test_what_is_no_expression_is_refused(expression: str) -> None:
    async with Calculator() as calculator:
        assert await calculator.ask(expression) == "!"


async def test_one_that_was_killed_is_an_error_and_no_endless_wait() -> None:
    async with Calculator() as calculator:
        os.kill(calculator.pid, 9)
        with pytest.raises(RuntimeError, match=f"pid {calculator.pid}. is gone"):
            await calculator.ask("1+1")


async def test_an_answer_that_nobody_waited_for_is_never_taken_for_the_next_one() -> None:
    async with Calculator() as calculator:
        asking = asyncio.create_task(calculator.ask("1+1"))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(RuntimeError, match="is gone"):
            await calculator.ask("2+2")
