"""Calls into actors: which thread they run on, what they leave behind, what their failures say."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.actors import end
from stepscope.engines import actor_call
from stepscope.engines.actor_call import ActorGoneError, ActorLine, CallFailedError, present

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("ray_cluster")


class Sync:
    def pid(self) -> int:
        return os.getpid()


class Async:
    async def release(self, path: str) -> None:
        Path(path).touch()  # noqa: ASYNC240


KINDS: dict[str, tuple[type, dict[str, int]]] = {
    "sync": (Sync, {}),
    "threaded": (Sync, {"max_concurrency": 4}),
    "async": (Async, {}),
}


@pytest.fixture(scope="module")
def actors(ray_cluster: None) -> Iterator[dict[str, Any]]:
    made = {name: ray.remote(kind).options(**options).remote() for name, (kind, options) in KINDS.items()}
    yield made
    for actor in made.values():
        ray.kill(actor)


def thread_here(instance: object) -> str:
    main = threading.current_thread() is threading.main_thread()
    return "main" if main else threading.current_thread().name


async def thread_of_the_loop(instance: object) -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


def wait_for(instance: object, path: str) -> str:
    until = time.monotonic() + 20
    while not Path(path).exists():
        assert time.monotonic() < until
        time.sleep(0.01)  # released by a call of another method of the actor
    return "released"


def fail(instance: object) -> None:
    raise ValueError("no such luck")


def give_a_lock(instance: object) -> Any:
    return threading.Lock()


def jobs_here(instance: object) -> int:
    return len(actor_call._jobs)


async def test_a_plain_function_runs_on_a_sync_actors_main_thread(actors: dict[str, Any]) -> None:
    assert await ActorLine(actors["sync"]).call(thread_here) == "main"


async def test_a_plain_function_that_waits_leaves_an_async_actor_at_work_v10(
    actors: dict[str, Any], tmp_path: Path
) -> None:
    waiting = asyncio.create_task(ActorLine(actors["async"]).call(wait_for, str(tmp_path / "free")))
    await asyncio.sleep(0)
    await asyncio.wait_for(actors["async"].release.remote(str(tmp_path / "free")), 20)
    assert await waiting == "released"


async def test_an_argument_that_cannot_be_pickled_is_an_error_of_one_line(actors: dict[str, Any]) -> None:
    with pytest.raises(CallFailedError, match="be sent: TypeError") as caught:
        await ActorLine(actors["sync"]).call(present, threading.Lock())
    assert len(str(caught.value).splitlines()) == 1


async def test_a_result_that_cannot_be_pickled_is_an_error(actors: dict[str, Any]) -> None:
    with pytest.raises(CallFailedError, match=r"_thread\.lock"):
        await ActorLine(actors["sync"]).call(give_a_lock)


async def test_a_dead_actor_says_what_it_died_of() -> None:
    actor = ray.remote(Sync).remote()
    await actor.pid.remote()
    await asyncio.to_thread(end, actor)
    line = ActorLine(actor)
    line.tell(fail)
    with pytest.raises(ActorGoneError, match=r"died: .*`ray\.kill`"):
        await line.ask(present)


async def test_a_call_after_ray_was_shut_down_starts_no_other_ray(
    actors: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`remote` itself would start one, and look for the actor there."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ActorGoneError, match="was shut down"):
        await ActorLine(actors["sync"]).call(present)
    ActorLine(actors["sync"]).tell(present)


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_leave_nothing_behind_in_the_actor(actors: dict[str, Any], kind: str) -> None:
    line = ActorLine(actors[kind])
    await line.call(thread_of_the_loop)
    for keep in (False, True):
        given_up = asyncio.create_task(line.call(thread_of_the_loop, keep=keep))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
    until = time.monotonic() + 20
    while await line.ask(jobs_here):
        assert time.monotonic() < until
