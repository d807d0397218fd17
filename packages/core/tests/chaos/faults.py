"""Faults for a step: each strikes at one moment of it, and is undone after it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import ray
from trainer import Trainer

from stepscope import ProfileConfig, capture
from stepscope.files.layout import RunLayout, StepLayout

MOMENTS = ("opening", "body", "closing", "after")
WORKERS = ("learner 0", "learner 1", "env")
ACTORS = (*WORKERS, "replica 0", "replica 1")
STUCK_S = 8.0
"""Longer than the deadline of the chaos runs (3 s)."""


@dataclass
class World:
    trainer: Trainer
    layout: RunLayout
    step: StepLayout
    rng: random.Random
    config: ProfileConfig


@dataclass
class Fault:
    name: str
    moment: str
    """The moment at which `strike` is called, on a separate thread."""
    strike: Callable[[], object]
    heal: Callable[[], object] = lambda: None
    harmed: Collection[str] = frozenset()
    """Participants whose part of the manifest may be less than ok."""
    folder_lost: bool = False
    raises: tuple[type[BaseException], ...] = ()
    """Exceptions that the step may raise, beside those of a lost actor."""
    in_body: BaseException | None = None
    """Raised by the body."""
    in_task: bool = False
    """Needs a step that is a task of an event loop."""
    in_main: bool = False
    """Needs a step that runs synchronously."""
    task_begins: Callable[[], object] = lambda: None
    """Called in the task, before anything else."""
    delay_s: float = 0.0
    struck_s: float | None = None
    """Time of the strike on the monotonic clock; None before it."""

    def start(self, moment: str) -> None:
        if moment == self.moment:
            self._thread = threading.Thread(target=self._strike, name=f"fault {self.name}", daemon=True)
            self._thread.start()

    def _strike(self) -> None:
        time.sleep(self.delay_s)
        self.struck_s = time.monotonic()
        try:
            with contextlib.suppress(ray.exceptions.RayError, OSError):
                self.strike()
        except AssertionError as error:
            self._found = error

    def end(self) -> None:
        """Wait for the strike. Raises what it found."""
        if self._thread is not None:
            self._thread.join()
        self.heal()
        if self._found is not None:
            raise self._found

    _found: AssertionError | None = field(default=None, repr=False)
    _thread: threading.Thread | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.name}, {self.moment} + {self.delay_s:.2f} s"


def choose(world: World, only: str | None = None) -> Fault:
    """Return a fault for the world's step, by its random numbers."""
    name = world.rng.choice(sorted(FAULTS)) if only is None else only
    fault = (FAULTS | {"nothing": nothing})[name](world)
    fault.name = f"{name}{' of ' if fault.name else ''}{fault.name}"
    fault.delay_s = world.rng.choice((0.0, world.rng.uniform(0, 0.05), world.rng.uniform(0, 0.5)))
    return fault


# Processes and actors.


def kill(world: World) -> Fault:
    who = world.rng.choice(ACTORS)
    number = world.rng.choice((signal.SIGKILL, signal.SIGTERM))
    pid = world.trainer.pids[who]
    return Fault(who, _moment(world), lambda: os.kill(pid, number), harmed={who})


def ray_kill(world: World) -> Fault:
    who = world.rng.choice(ACTORS)
    actor = world.trainer.actors[who]
    return Fault(who, _moment(world), lambda: ray.kill(actor), harmed={who})


def freeze(world: World) -> Fault:
    """SIGSTOP, for longer than the deadline or shorter; the process goes on afterwards."""
    who = world.rng.choice(ACTORS)
    pid, seconds = world.trainer.pids[who], world.rng.choice((0.3, STUCK_S))

    def strike() -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    return Fault(f"{who} for {seconds} s", _moment(world), strike, harmed={who})


def busy(world: World) -> Fault:
    who = world.rng.choice(ACTORS)
    actor, seconds = world.trainer.actors[who], world.rng.choice((0.5, STUCK_S))

    def strike() -> None:
        ray.get(actor.be_busy.remote(seconds))

    return Fault(f"{who} for {seconds} s", _moment(world), strike, harmed={who})


def engine_fault(world: World) -> Fault:
    what, value = world.rng.choice(
        (("hangs_on_start", 1), ("hangs_on_stop", 1), ("fails_to_start", 0), ("dead", True))
    )
    replica = world.trainer.actors["replica 0"]
    return Fault(
        f"replica 0: {what}",
        world.rng.choice(("before", "opening", "body")),
        lambda: ray.get(replica.spoil.remote(what, value)),
        lambda: ray.get(replica.renew.remote()),
        harmed={"replica 0"},
    )


def fork(world: World) -> Fault:
    who = world.rng.choice(("learner 0", "learner 1"))
    actor = world.trainer.actors[who]
    return Fault(who, _moment(world), lambda: ray.get(actor.fork.remote()))


def fork_driver(world: World) -> Fault:
    code = "import os\npid = os.fork()\nos._exit(0) if pid == 0 else os.waitpid(pid, 0)"
    return Fault("", "body", lambda: exec(code))


# Disks and folders.


def full_disk(world: World) -> Fault:
    """No file of these processes can grow beyond 600 bytes: what a full disk is to a program."""
    who = world.rng.choice(("driver", *ACTORS))
    pid = os.getpid() if who == "driver" else world.trainer.pids[who]
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)

    def heal() -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

    limit = (world.rng.choice((0, 600)), before[1])
    return Fault(
        who,
        _moment(world),
        lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, limit),
        heal,
        harmed={who},
        folder_lost=True,
    )


def lost_folder(world: World) -> Fault:
    what = world.rng.choice(("step", "spans", "traces", "processes", "run"))
    folder = {
        "step": world.step.root,
        "spans": world.step.spans,
        "traces": world.step.traces,
        "processes": world.step.processes,
        "run": world.layout.root,
    }[what]
    return Fault(
        what,
        _moment(world),
        lambda: shutil.rmtree(folder, ignore_errors=True),
        harmed={"*"},
        folder_lost=True,
    )


def folder_is_a_file(world: World) -> Fault:
    folder = world.rng.choice((world.step.spans, world.step.traces, world.step.processes, world.step.root))

    def strike() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.write_text("in the way")

    def heal() -> None:
        if folder.is_file():  # somebody may have written into the folder while it was removed
            folder.unlink()

    return Fault(
        folder.name,
        _moment(world),
        strike,
        heal,
        harmed={"*"},
        folder_lost=True,
    )


def broken_part(world: World) -> Fault:
    """Somebody else's part of the manifest is overwritten with rubbish."""

    def strike() -> None:
        for path in sorted(world.step.processes.glob("[!.]*.json")):
            data = path.read_bytes()
            cut = world.rng.randrange(len(data) or 1)
            path.write_bytes(world.rng.choice((data[:cut], b"\xff\xfe", b"", b"[" * 100_000)))

    return Fault("", _moment(world), strike, harmed={"*"}, folder_lost=True)


def other_run(world: World) -> Fault:
    """Another process captures the same step into the same folder at the same time."""
    code = (
        "import sys; from stepscope import ProfileConfig, capture, span\n"
        "config = ProfileConfig(save_path=sys.argv[1], steps='every:1', control={'requests': False})\n"
        "for _ in range(5):\n"
        "    with capture(int(sys.argv[2]), config=config):\n"
        "        with span('other'): pass\n"
    )
    number = int(world.step.root.name.removeprefix("step_"))
    command = [sys.executable, "-c", code, str(world.layout.root), str(number)]
    return Fault(
        "", world.rng.choice(("opening", "body")), lambda: subprocess.run(command, check=True, timeout=60)
    )


# Control files.

HOSTILE: tuple[bytes, ...] = (
    b"", b"{", b"null", b"[]", b"{}", b"[" * 60_000, b"\xff" * 100, b"0" * 70_000, b'{"format": 2}',
    b'{"requests": [{"id": "../../x"}]}', b'{"requests": "all"}', b'{"format": 1, "requests": [{}]}',
    b'{"requests":[{"id":"00000000","steps":"1:2:0","created_ns":0,"expires_ns":9999999999999999999}]}',
    b'{"requests":[{"id":"00000001","steps":"next","tool":"nothing","created_ns":0,"expires_ns":9000000000000000000}]}',
    b'{"requests":[{"id":"00000002","steps":"0:99999999999999999999","created_ns":0,"expires_ns":9000000000000000000}]}',
)  # fmt: skip


def hostile_requests(world: World) -> Fault:
    """`control.json` changes all the time, and never for the better."""

    def strike() -> None:
        path = world.layout.control
        for _ in range(30):
            _put_away(path)
            kind = world.rng.randrange(10)
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == 0:
                path.mkdir()
            elif kind == 1:
                os.mkfifo(path)
            elif kind == 2:
                path.symlink_to("/dev/zero")
            elif kind == 3:
                path.symlink_to(path)
            else:
                path.write_bytes(world.rng.choice(HOSTILE))
            time.sleep(0.01)

    def heal() -> None:
        _put_away(world.layout.control)
        shutil.rmtree(world.layout.root / "control", ignore_errors=True)

    return Fault("", world.rng.choice(("before", *MOMENTS)), strike, heal)


def _put_away(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# Clocks.


def clock_jump(world: World) -> Fault:
    """Set the wall clock of one process forth or back, and set it right again after the step."""
    who = world.rng.choice(("driver", *ACTORS))
    seconds = world.rng.choice((-86_400.0, -1.5, 0.5, 3600.0))
    if who == "driver":
        return Fault(
            f"{who} by {seconds} s",
            _moment(world),
            lambda: set_clock(None, seconds),
            lambda: set_clock(None, 0),
            harmed={"*"},
        )
    actor = world.trainer.actors[who]

    def tell(by: float) -> None:
        ray.get(actor.__ray_call__.remote(set_clock, by))

    return Fault(
        f"{who} by {seconds} s", _moment(world), lambda: tell(seconds), lambda: tell(0), harmed={who}
    )


def set_clock(instance: object, seconds: float) -> None:
    """Move this process' time of day by `seconds` from the true one."""
    real = getattr(time, "_real_time_ns", time.time_ns)
    time._real_time_ns = real  # type: ignore[attr-defined]  # kept where a second call finds it
    time.time_ns = (lambda: real() + int(seconds * 1e9)) if seconds else real


# The owner's own trouble.


def cancelled(world: World) -> Fault:
    """Cancel the task that captures, at any point."""
    tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[object] | None]] = []
    return Fault(
        "",
        world.rng.choice(("opening", "body", "closing")),
        lambda: _cancel(*tasks[0]),
        harmed={"*"},
        raises=(asyncio.CancelledError,),
        in_task=True,
        task_begins=lambda: tasks.append((asyncio.get_running_loop(), asyncio.current_task())),
    )


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[object] | None) -> None:
    with contextlib.suppress(RuntimeError):  # the step was faster
        loop.call_soon_threadsafe(lambda: task and task.cancel())


def interrupted(world: World) -> Fault:
    """Ctrl-C, in synchronous code, anywhere."""
    return Fault(
        "", world.rng.choice(("opening", "body", "closing")), lambda: os.kill(os.getpid(), signal.SIGINT),
        harmed={"*"}, raises=(KeyboardInterrupt,), in_main=True,
    )  # fmt: skip


def raising_body(world: World) -> Fault:
    error = world.rng.choice((ValueError("the user's"), KeyboardInterrupt(), SystemExit(3)))
    return Fault(type(error).__name__, "body", lambda: None, raises=(type(error),), in_body=error)


def no_threads_to_spare(world: World) -> Fault:
    """Blocking calls of the user's fill the default executor of the driver's loop until the step is over."""
    release = threading.Event()

    def fill() -> None:
        for _ in range(40):
            asyncio.get_running_loop().run_in_executor(None, release.wait, 60)

    return Fault("", "after", release.set, release.set, in_task=True, task_begins=fill)


def many_captures(world: World) -> Fault:
    """Make a thousand captures of this process alone before the step, as fast as possible."""
    layout = RunLayout(world.layout.root.with_name("rapid"))
    config = world.config.replace(save_path=str(layout.root), steps="every:2", finish={})
    count = int(os.environ.get("CHAOS_RAPID", "1000"))

    def strike() -> None:
        for number in range(count):
            with capture(number, config=config, workers=()):
                pass
        captured = sum(number % 2 == 0 for number in layout.steps())  # the recorder writes slow ones
        shutil.rmtree(layout.root)
        if captured != (count + 1) // 2:
            raise AssertionError(f"{captured} of {count} captures left a folder")

    return Fault("", "before", strike)


def nothing(world: World) -> Fault:
    """For drivers that are themselves the victim."""
    return Fault("", "before", lambda: None)


def _moment(world: World) -> str:
    return world.rng.choice(MOMENTS)


FAULTS: dict[str, Callable[[World], Fault]] = {
    fault.__name__: fault
    for fault in (
        kill, ray_kill, freeze, busy, engine_fault, fork, fork_driver, full_disk, lost_folder,
        folder_is_a_file, broken_part, other_run, hostile_requests, clock_jump, cancelled, interrupted,
        raising_body, no_threads_to_spare, many_captures,
    )
}  # fmt: skip
"""All faults by name."""
