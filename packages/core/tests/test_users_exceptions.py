"""Exceptions of the user's that come up in the middle of our code: out of a signal's handler, or thrown in.

They reach the user's `except`, and every scope that they cut short is left.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import pytest
import torch

from packages.core.tests.runs import handling, python, spans_alone
from stepscope import ProfileConfig, attach, capture, profile_step, span, trajectory, turn
from stepscope._recording.spans import scopes
from stepscope.errors import is_users, ours

SOURCE = Path(scopes.__file__).parents[2]
between_instructions = pytest.mark.skipif(
    sys.version_info < (3, 11),
    reason="3.10 looks for signals between a call and what is done with its result: decision 36",
)


class Interruption(Protocol):
    """An object whose negation has an exception come up at the next place where Python looks for signals.

    The negation itself is an instruction without such a place, and so is a product of matrices.
    """

    def __neg__(self) -> object: ...


class Timeout(Exception):
    """The timeout of a reward function."""


def on_alarm(signum: int, frame: object) -> None:
    raise Timeout


def by_signal() -> Callable[[], object]:
    return partial(ctypes.CDLL(None)["raise"], int(signal.SIGALRM))


def by_throwing() -> Callable[[], object]:
    return partial(
        ctypes.pythonapi.PyThreadState_SetAsyncExc,
        ctypes.c_ulong(threading.get_ident()),
        ctypes.py_object(Timeout),
    )


@pytest.fixture(params=[by_signal, by_throwing])
def interruption(request: pytest.FixtureRequest) -> Iterator[Interruption]:
    with handling(signal.SIGALRM, on_alarm):
        # A partial in a class is a method from Python 3.14 on.
        yield type("Interruption", (), {"__neg__": staticmethod(request.param())})()


def spans_of(folder: Path, step: int = 0) -> list[dict[str, object]]:
    lines = [
        line for path in folder.glob(f"step_{step:06d}/spans/*") for line in path.read_text().splitlines()
    ]
    return [record for record in map(json.loads, lines) if record["kind"] in ("span", "open")]


SCOPES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "span": lambda: span("inner"),
    "trajectory": lambda: trajectory("t"),
    "turn": lambda: turn(0),
    "carrier": lambda: attach({"process": "elsewhere", "span": 1}),
}


@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)
@pytest.mark.parametrize("above", [None, "outer"])
@pytest.mark.parametrize("captured", [True, False])
def test_a_scope_that_an_exception_kept_from_being_left_ends_with_its_step(
    scope: Callable[[], AbstractContextManager[object]],
    above: str | None,
    captured: bool,
    interruption: Interruption,
    tmp_path: Path,
) -> None:
    config = spans_alone(tmp_path)
    with span("around"), capture(0, config=config if captured else ProfileConfig()):
        before = scopes.current.get()
        with nullcontext() if above is None else trajectory(above):
            with pytest.raises(Timeout):
                with scope():
                    _ = -interruption
        assert above is None or scopes.current.get() is before
    assert scopes.current.get() is None


def test_an_error_ends_the_scopes_inside_of_the_one_that_it_leaves(
    interruption: Interruption, tmp_path: Path
) -> None:
    with capture(0, config=spans_alone(tmp_path)):
        with pytest.raises(Timeout):
            with span("outer"):
                with span("inner"):
                    _ = -interruption
        assert scopes.current.get() is None
    assert ["Timeout" in str(record.get("error")) for record in spans_of(tmp_path)] == [True, True]


def test_a_capture_that_ends_elsewhere_leaves_the_scopes_there_alone(tmp_path: Path) -> None:
    with trajectory("one"):
        captured = capture(0, config=spans_alone(tmp_path)).open()
    with trajectory("two"):
        inside = scopes.current.get()
        captured.close()
        assert scopes.current.get() is inside
    assert scopes.current.get() is None


def test_an_async_scope_is_left_when_an_exception_comes_up_at_its_end(
    interruption: Interruption, tmp_path: Path
) -> None:
    async def work() -> None:
        with pytest.raises(Timeout):
            async with span("outer"):
                async with span("inner"):
                    _ = -interruption
        assert scopes.current.get() is None

    with capture(0, config=spans_alone(tmp_path)):
        asyncio.run(work())
    assert ["Timeout" in str(record.get("error")) for record in spans_of(tmp_path)] == [True, True]


def test_a_decorated_call_is_left_when_an_exception_comes_up_at_its_end(
    interruption: Interruption, tmp_path: Path
) -> None:
    @profile_step(role="reward")
    def score() -> None:
        _ = -interruption

    with capture(0, config=spans_alone(tmp_path)):
        with pytest.raises(Timeout):
            score()
        assert scopes.current.get() is None
    (record,) = spans_of(tmp_path)
    assert "Timeout" in str(record["error"])


ALARMS = """
import json, random, signal, sys
from stepscope import capture, configure, profile_step, span
configure(save_path=sys.argv[1], steps="every:1", roles={"*": {"profiler": "off"}})
class Timeout(Exception): pass
fired = caught = 0
def on_alarm(*_):
    global fired
    fired += 1
    raise Timeout
signal.signal(signal.SIGALRM, on_alarm)
rng = random.Random(3)
@profile_step(role="reward")
def score(n):
    for _ in range(n): pass
def short():
    for _ in range(4): score(5)
@profile_step(role="reward")
def reward():
    for _ in range(4):
        with span("tool", role="env"): sum(range(50))
with capture(0) as c:
    for round in range(3000):
        with span("generate", role="rollout"): pass
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.random() * 2e-5 + 1e-6)
            (short if round % 2 else reward)()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Timeout:
            caught += 1
c.result.wait(60)
print(json.dumps([fired, caught]))
"""


@between_instructions
def test_every_timeout_of_a_reward_reaches_it_and_no_span_hangs_below_a_dead_one(tmp_path: Path) -> None:
    fired, caught = json.loads(python(ALARMS, tmp_path, STEPSCOPE_RAISE="0").splitlines()[0])
    assert fired == caught > 0
    records = spans_of(tmp_path)
    tops = [record for record in records if record["stage"] == "generate"]
    assert len(tops) == 3000
    assert not [record for record in tops if "parent" in record or "link" in record]
    assert not [record for record in records if record["kind"] == "open"]


@between_instructions
def test_what_is_thrown_into_a_thread_ends_its_work(tmp_path: Path) -> None:
    begun, ended = SimpleQueue[None](), []

    @profile_step(role="reward")
    def score() -> None: ...

    def work() -> None:
        try:
            begun.put(None)
            while True:
                score()
        except Timeout:
            ended.append(scopes.current.get())

    with capture(0, config=spans_alone(tmp_path)):
        for _ in range(100):
            thread = threading.Thread(target=work)
            thread.start()
            begun.get()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Timeout)
            )
            thread.join(30)
            assert not thread.is_alive()
    assert ended == [None] * 100


def test_attributes_that_take_long_are_cut_short_by_a_timeout(tmp_path: Path) -> None:
    class Slow:
        def __str__(self) -> str:
            signal.raise_signal(signal.SIGALRM)
            return "never"

    def attrs(batch: object) -> dict[str, object]:
        signal.raise_signal(signal.SIGALRM)
        return {}

    @profile_step(role="reward", attrs=attrs)  # type: ignore[arg-type]
    def score(batch: object) -> None: ...

    with handling(signal.SIGALRM, on_alarm), capture(0, config=spans_alone(tmp_path)):
        with pytest.raises(Timeout):
            span("reward", attrs={"of": Slow()})  # type: ignore[dict-item]
        with pytest.raises(Timeout):
            score(1)


@pytest.mark.parametrize("during", ["start_trace", "stop_trace"])
def test_a_timeout_that_hits_the_profiler_reaches_the_user(
    during: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ProfileConfig.from_mapping({"steps": "every:1", "save_path": str(tmp_path)})
    alarms = [signal.SIGALRM]
    original = getattr(torch.profiler.profiler._KinetoProfile, during)
    with capture(2, config=config):  # the first start of torch's profiler in this process is done
        pass

    def interrupted(profile: object) -> None:
        if alarms:
            signal.raise_signal(alarms.pop())
        original(profile)

    monkeypatch.setattr(torch.profiler.profiler._KinetoProfile, during, interrupted)
    with handling(signal.SIGALRM, on_alarm), pytest.raises(Timeout), capture(0, config=config):
        torch.ones(2).sum()
    with capture(1, config=config) as captured:
        torch.ones(2).sum()
    assert captured.result.wait(60)
    captured.result.raise_for_missing()
    kept = list(tmp_path.glob("step_000000/traces/*/*.json.gz"))
    assert bool(kept) == (during == "stop_trace")


def raised(handler: Callable[..., object]) -> Callable[[], object]:
    def work() -> None:
        with handling(signal.SIGALRM, handler):
            signal.raise_signal(signal.SIGALRM)

    return work


class Handler:
    def __call__(self, *arguments: object) -> None:
        self.fail(TimeoutError())

    def method(self, signum: int, frame: object) -> None:
        self.fail(OSError("out of time"))

    def fail(self, error: Exception) -> None:
        raise error


def empty_queue() -> None:
    import queue

    queue.Queue[None]().get_nowait()


class Entries(tuple[int, ...]):
    """As the entry points of Python 3.10, which warn when they are iterated over."""

    __slots__ = ()

    def __iter__(self) -> Iterator[int]:
        raise DeprecationWarning("entries are no tuple")

    def first(self) -> int:
        return self[0]


USERS: dict[str, Callable[[], object]] = {
    "a function": raised(on_alarm),
    "an object": raised(Handler()),
    "a method": raised(Handler().method),
    "a partial": raised(partial(on_alarm)),
    "a lambda": raised(lambda signum, frame: Handler().fail(ValueError("late"))),
    "thrown": lambda: by_throwing()() and len(""),
}
OURS: dict[str, Callable[[], object]] = {
    "a key": lambda: {"a": 1}["key"],
    "a file": lambda: open("/no/such/file"),  # noqa: SIM115
    "a number": lambda: int("x"),
    "raised": lambda: Handler().fail(Timeout()),
    "a queue": empty_queue,
    "an iterator": lambda: next(iter(())),
    "a kind of tuple": lambda: Entries().first(),
}


@pytest.mark.parametrize("work", USERS.values(), ids=USERS)
def test_what_a_handler_raises_is_the_users(work: Callable[[], object]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        try:
            work()
        except ours():
            pytest.fail("it was caught")
    assert is_users(caught.value)


@pytest.mark.parametrize("work", OURS.values(), ids=OURS)
def test_what_our_code_raises_is_ours(work: Callable[[], object]) -> None:
    with pytest.raises(Timeout, match="it was caught"):
        try:
            work()
        except ours() as error:
            raise Timeout("it was caught") from error


def test_no_except_of_the_recording_half_takes_the_users_exceptions() -> None:
    wide = re.compile(r"except Exception|suppress\(Exception|except:")
    takers = [
        f"{path.relative_to(SOURCE)}:{number}"
        for part in ("_recording", "backends", "engines", "integrations", "files/values.py")
        for path in ((SOURCE / part).rglob("*.py") if (SOURCE / part).is_dir() else [SOURCE / part])
        if path.name != "sitecustomize.py"  # it runs before the first line of the user's program
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if wide.search(line)
    ]
    assert not takers
