"""The torch backend where plain torch.profiler is a segmentation fault: each case in a process of its own.

One file above 400 lines, because all of them are run in the same way.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

pytestmark = pytest.mark.needs("torch")

SERVER = """
import gc, json, os, signal, sys
import torch, torch._inductor.config, torch.profiler  # the seconds that every case would pay
from stepscope.backends.torch.backend import TorchBackend
from stepscope.testing import backend_conformance

gc.freeze()  # a child that exits would walk, and so copy, every page of torch's objects: a second
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os.chdir(job["folder"])
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), stream)
        sys.argv[1:] = job["arguments"]
        exec(job["script"])
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Forks a process for each case, before torch has run an operator or Kineto was initialised."""

PRELUDE = """
import atexit, threading
from pathlib import Path
from torch.profiler import ProfilerActivity, profile
from stepscope.backends.window_thread import MAIN, OWNER, run_on
from stepscope.config import ProfileConfig, TorchConfig
from stepscope.errors import BackendError, ProfilerBusyError
from stepscope.testing.backend_conformance import a_window, in_thread

backend = TorchBackend(ProfileConfig(torch=TorchConfig(all_threads="--all-threads" in sys.argv)))

def work(name):
    with torch.profiler.record_function(name):
        torch.ones(8, 8) @ torch.ones(8, 8)

def names(path):
    return {event["name"] for event in json.loads(Path(path).read_text())["traceEvents"]}

def write(pending):
    [one] = pending
    one.write(Path("ours.json"))
    return names("ours.json")

def start():
    backend.start(a_window())
    work("ours")

def theirs(name="theirs"):
    with profile(activities=[ProfilerActivity.CPU]) as session:
        work(name)
    session.export_chrome_trace(name + ".json")
    assert name in names(name + ".json")
"""


Run = Callable[..., str]
both = pytest.mark.parametrize("flags", [(), ("--all-threads",)], ids=["main-thread", "all-threads"])


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        yield server


@pytest.fixture
def run(server: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Return the output of a script in a process and a folder of its own, with the names of `PRELUDE`."""

    def run(script: str, *arguments: str, status: int = 0) -> str:
        assert server.stdin is not None
        assert server.stdout is not None
        job = {"folder": str(tmp_path), "arguments": arguments, "script": PRELUDE + dedent(script)}
        print(json.dumps(job), file=server.stdin, flush=True)
        assert int(server.stdout.readline()) == status, (tmp_path / "stderr").read_text()
        print((tmp_path / "stderr").read_text(), file=sys.stderr)
        return (tmp_path / "stdout").read_text()

    return run


def test_the_first_window_of_a_process_imports_no_compiler(tmp_path: Path) -> None:
    """The compiler takes 2 s of CPU, and the server above has imported it."""
    imports = "import json, sys, torch\nfrom stepscope.backends.torch.backend import TorchBackend\n"
    script = """
        start()
        assert "ours" in write(backend.stop())
        assert "torch._inductor" not in sys.modules
        theirs()
        assert "torch._inductor" in sys.modules, "the user's profiler has it, as without stepscope"
        start()
        assert "ours" in write(backend.stop())
        """
    command = [sys.executable, "-c", imports + PRELUDE + dedent(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@both
@pytest.mark.parametrize(
    ("ending", "status"),
    [("", 0), ("raise KeyError('the user')", 1), ("sys.exit(3)", 3)],
    ids=["end", "error", "exit"],
)
def test_a_process_may_exit_with_the_window_open(
    run: Run, flags: tuple[str, ...], ending: str, status: int
) -> None:
    run(f"start()\n{ending}", *flags, status=status)


@both
def test_a_stop_at_exit_gets_the_trace_whoever_registered_first(run: Run, flags: tuple[str, ...]) -> None:
    done = run(
        """
        early = lambda: print("early", "ours" in write(backend.stop()))
        atexit.register(early)  # runs after the backend's own end of the window
        start()
        """,
        *flags,
    )
    assert done == "early True\n"


def test_sigterm_kills_as_it_would_without_us(run: Run) -> None:
    run("start(); os.kill(os.getpid(), signal.SIGTERM)", status=-signal.SIGTERM)


@pytest.mark.parametrize(
    ("handler", "status"),
    [("", -signal.SIGTERM), ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", 7)],
    ids=["default", "exit"],
)
def test_sigterm_while_the_main_thread_stops_a_window_for_another_thread_waits_for_the_stop(
    run: Run, tmp_path: Path, handler: str, status: int
) -> None:
    run(
        f"""
        from stepscope import capture
        from stepscope.backends.torch import window as torch_window
        original = torch_window._stop
        def stop_interrupted(profile):
            assert threading.current_thread() is threading.main_thread()
            os.kill(os.getpid(), signal.SIGTERM)
            return original(profile)
        budget = {{"seconds": 0.2}}
        config = ProfileConfig(save_path="run", steps=[0], torch={{"activities": ["cpu"]}}, budget=budget)
        {handler}
        with capture(0, config=config):
            torch_window._stop = stop_interrupted
            while True:
                work("ours")
        """,
        status=status,
    )
    manifest = json.loads((tmp_path / "run/step_000000/manifest.json").read_text())
    (item,) = [item for item in manifest["processes"][0]["expected"] if item["name"] == "torch trace"]
    assert (item["state"], len(item["artifacts"])) == ("partial", 1)


@both
def test_a_sigterm_handler_can_stop_and_write(run: Run, flags: tuple[str, ...]) -> None:
    done = run(
        """
        def on_term(*_):
            print("ours" in write(backend.stop()))
            sys.exit(7)
        signal.signal(signal.SIGTERM, on_term)
        start()
        os.kill(os.getpid(), signal.SIGTERM)
        """,
        *flags,
        status=7,
    )
    assert done == "True\n"


def test_a_signal_handler_that_interrupts_a_stop_is_told_and_the_trace_is_kept(run: Run) -> None:
    done = run(
        """
        from stepscope.backends.torch import window as torch_window
        original = torch_window._stop
        def stop_interrupted(profile):
            os.kill(os.getpid(), signal.SIGUSR1)
            return original(profile)
        torch_window._stop = stop_interrupted
        def handler(*_):
            try:
                backend.stop()
            except BackendError as error:
                print(error)
        signal.signal(signal.SIGUSR1, handler)
        start()
        print("ours" in write(backend.stop()))
        """
    )
    told, kept = done.splitlines()
    assert "interrupted" in told
    assert kept == "True"


@both
@pytest.mark.parametrize(
    ("call", "thread"),
    [("theirs()", "MainThread"), ("in_thread(lambda: [theirs()])", "test-thread")],
    ids=["the same thread", "another thread"],
)
def test_a_user_profiler_inside_ours_ends_ours_and_both_are_whole(
    run: Run, flags: tuple[str, ...], call: str, thread: str
) -> None:
    done = run(
        f"""
        start()
        {call}
        work("later")
        pending = backend.stop()
        print(pending[0].truncated)
        found = write(pending)
        assert "ours" in found and not {{"theirs", "later"}} & found, found
        start()
        assert "ours" in write(backend.stop())
        """,
        *flags,
    )
    assert done.endswith(f"on thread {thread}\n")


def test_ranges_for_other_tools_and_legacy_profilers_end_ours_and_run(run: Run) -> None:
    done = run(
        """
        import warnings
        from torch.autograd.profiler import emit_itt
        from torch.autograd.profiler_legacy import profile as legacy
        warnings.simplefilter("ignore")  # it is deprecated
        for theirs in (emit_itt, legacy):
            start()
            with theirs():
                work("theirs")
            pending = backend.stop()
            print(pending[0].truncated)
            found = write(pending)
            assert "ours" in found and "theirs" not in found, found
        with emit_itt():
            try:
                start()
            except ProfilerBusyError:
                print("refused")
        """
    )
    ended = "other code started torch.profiler on thread MainThread\n"
    assert done == ended * 2 + "refused\n"


def test_a_user_profiler_that_would_crash_the_process_is_refused(run: Run) -> None:
    """Ours belongs to the main thread, which does not answer: it can neither be ended nor survive theirs."""
    done = run(
        """
        def refused():
            try:
                theirs()
            except ProfilerBusyError as error:
                print(error)
        start()
        thread = threading.Thread(target=refused)
        MAIN.submit(lambda: (thread.start(), thread.join()))
        pending = backend.stop()
        print(pending[0].truncated)
        assert "ours" in write(pending)
        theirs()
        """
    )
    assert "cannot start on" in done
    assert done.endswith("None\n")


@both
def test_a_backend_dropped_while_recording_lets_the_next_one_start(run: Run, flags: tuple[str, ...]) -> None:
    done = run(
        """
        import warnings
        start()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del backend
        print(caught[0].category.__name__, caught[0].message)
        run_on(OWNER, lambda: None)  # which ends its window after what it has to do before
        backend = TorchBackend(ProfileConfig())
        start()
        assert "ours" in write(backend.stop())
        """,
        *flags,
    )
    assert "ResourceWarning a TorchBackend" in done


@both
def test_a_forked_child_exits_by_itself_and_the_parent_records_on(run: Run, flags: tuple[str, ...]) -> None:
    """Plain torch: the child hangs in exit(), in a destructor that waits for a thread it does not have."""
    done = run(
        """
        start()
        child = os.fork()
        if child == 0:
            assert backend.stop() == []
            work("child")
            sys.exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        work("parent")
        found = write(backend.stop())
        print({"ours", "parent"} <= found, "child" in found)
        """,
        *flags,
    )
    assert done == "5\nTrue False\n"


@both
def test_a_forked_child_may_profile_for_itself(run: Run, flags: tuple[str, ...]) -> None:
    done = run(
        """
        start()
        if os.fork() == 0:
            backend = TorchBackend(backend._config)
            for _ in range(2):
                start()
                in_thread(lambda: [work("a thread of the child")])
                found = write(backend.stop())
                assert {"ours", "aten::mm"} <= found, found
                assert ("a thread of the child" in found) == bool(sys.argv[1:])
                theirs()
            print("recorded")
            sys.exit()
        os.wait()
        """,
        *flags,
    )
    assert done == "recorded\n"


GROWN = """
def grown():
    statm, some = Path("/proc/self/statm"), torch.ones(1)
    some + 1
    before = int(statm.read_text().split()[1])
    for _ in range(50_000):
        some + 1
    return int(statm.read_text().split()[1]) - before
"""


def test_operators_of_a_forked_childs_threads_are_recorded_for_nobody(run: Run) -> None:
    done = run(
        GROWN
        + """
start()
if os.fork() == 0:
    print(in_thread(grown))
    sys.exit()
os.wait()
""",
        "--all-threads",
    )
    assert int(done) < 5000  # pages; recorded, they take 12,500


@pytest.mark.parametrize("with_stack", [False, True])
def test_allocations_of_a_forked_child_are_recorded_for_nobody(run: Run, with_stack: bool) -> None:
    done = run(
        GROWN
        + f"""
memory = TorchConfig(profile_memory=True, with_stack={with_stack})
backend = TorchBackend(ProfileConfig(torch=memory))
start()
if os.fork() == 0:
    print(grown())
    backend = TorchBackend(backend._config)
    for _ in range(2):
        start()
        assert {{"ours", "aten::mm", "[memory]"}} <= write(backend.stop())
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.wait()[1]))
work("parent")
assert {{"ours", "parent", "[memory]"}} <= write(backend.stop())
"""
    )
    pages, status = done.split()
    assert status == "5"
    assert int(pages) < 1500  # recorded, they take 3,500


def test_a_full_disk_is_an_error_and_not_half_a_trace(run: Run) -> None:
    done = run(
        """
        import resource
        start()
        for _ in range(200):
            work("more")
        pending = backend.stop()
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # as a full disk: writing beyond it fails
        try:
            write(pending)
        except BackendError as error:
            print(error)
        """
    )
    assert "ends early" in done or "wrote no trace" in done


@both
def test_scopes_that_are_open_over_two_captures_end_with_the_first(run: Run, flags: tuple[str, ...]) -> None:
    run(
        """
        compiled = lambda: torch._C._profiler._RecordFunctionFast("compiled")  # as inductor's code does
        for _ in range(8):
            backend.start(a_window())
            scopes = [torch.profiler.record_function("open") for _ in range(500)]
            scopes += [compiled() for _ in range(500)]
            for scope in scopes:
                scope.__enter__()
            first = backend.stop()
            start()
            for scope in scopes:
                scope.__exit__(None, None, None)
            work("ours")
            [second] = backend.stop()
            second.discard()
        assert {"open", "compiled"} <= write(first)
        """,
        *flags,
    )


@both
def test_markers_that_are_open_over_two_cycles_end_with_the_first(run: Run, flags: tuple[str, ...]) -> None:
    run(
        """
        from contextlib import ExitStack
        from stepscope.backends import SpanInfo
        from stepscope.config import ScheduleConfig
        every = ScheduleConfig(active=1, repeat=0)
        recorded = TorchConfig(all_threads="--all-threads" in sys.argv, schedule=every)
        backend = TorchBackend(ProfileConfig(torch=recorded))
        for _ in range(8):
            backend.start(a_window())
            with ExitStack() as update:
                for _ in range(500):
                    span = SpanInfo(role="actor", stage="update", span=1, is_async=False)
                    update.enter_context(backend.range(span))
                work("ours")
                backend.advance()
                work("ours")
            first, second = backend.stop()
            second.discard()
        assert "actor.update" in write([first])
        """,
        *flags,
    )


def test_a_scope_that_begins_in_the_moment_of_a_stop_is_never_ended(run: Run) -> None:
    run(
        """
        from torch.profiler import record_function
        begin, restarts = record_function.__enter__, []
        def interrupted(scope):  # by a signal handler, between two lines of the scope's own beginning
            begin(scope)
            if restarts:
                restarts.pop()()
        record_function.__enter__ = interrupted
        def restart():
            drop(backend.stop())
            backend.start(a_window())
        def drop(artifacts):
            [one] = artifacts
            one.discard()
        start()
        for _ in range(300):
            restarts.append(restart)
            work("interrupted")
        drop(backend.stop())
        """
    )


BACKWARD = """
from stepscope.config import ScheduleConfig
class Calls(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        calls()
        return gradient.clone()
def train():
    x = torch.ones(8, 8)
    for _ in range(20):
        x = Calls.apply(x @ torch.ones(8, 8, requires_grad=True))
    x.sum().backward()
    work("ours")
"""


@both
def test_advance_inside_of_a_backward_pass_waits_for_its_end_and_is_said(
    run: Run, flags: tuple[str, ...]
) -> None:
    done = run(
        BACKWARD
        + dedent(
            """
            every = ScheduleConfig(active=1, repeat=0)
            recorded = TorchConfig(all_threads="--all-threads" in sys.argv, schedule=every)
            backend = TorchBackend(ProfileConfig(torch=recorded))
            calls = backend.advance
            for _ in range(6):
                start()
                train()
                [one] = backend.stop()
            print(one.truncated)
            assert {"ours", "CallsBackward"} <= write([one])
            """
        ),
        *flags,
    )
    assert done.startswith("advance() ")


def test_a_stop_from_another_thread_waits_for_the_end_of_a_backward_pass(run: Run) -> None:
    """Stopped inside of it, torch's session is back afterwards, and no other one ever starts."""
    run(
        BACKWARD
        + dedent(
            """
            def calls():
                if not threads:
                    threads.append(threading.Thread(target=lambda: stopped.append(backend.stop())))
                    threads[0].start()
                    while not (stopped or MAIN._tasks):  # until it has asked
                        threads[0].join(0.001)
            for _ in range(3):
                threads, stopped = [], []
                start()
                train()
                while not stopped:
                    threads[0].join(0.01)
                assert "aten::sum" in write(stopped[0])
                assert not torch._C._autograd._profiler_enabled()
            """
        )
    )


def test_scopes_of_a_session_that_is_not_ours_end_with_it_too(run: Run) -> None:
    run(
        """
        backend.prepare()
        every = torch.profiler.schedule(wait=0, warmup=0, active=1)
        with profile(activities=[ProfilerActivity.CPU], schedule=every) as session:
            for _ in range(8):
                scopes = [torch.profiler.record_function("open") for _ in range(500)]
                for scope in scopes:
                    scope.__enter__()
                session.step()
                for scope in scopes:
                    scope.__exit__(None, None, None)
                work("theirs")
        """
    )


def test_scopes_of_a_session_that_was_dropped_without_a_stop_end_before_the_next(run: Run) -> None:
    done = run(
        """
        backend.prepare()
        for _ in range(8):
            session = profile(activities=[ProfilerActivity.CPU])
            session.start()
            scopes = [torch.profiler.record_function("open") for _ in range(500)]
            for scope in scopes:
                scope.__enter__()
            session = profile(activities=[ProfilerActivity.CPU])  # as SGLang does when a prefill comes late
            session.start()
            for scope in scopes:
                scope.__exit__(None, None, None)
            work("theirs")
            session.stop()
        print("ended")
        sys.stdout.flush()
        os._exit(0)  # torch's own exit waits for the sessions that were dropped
        """
    )
    assert done.endswith("ended\n")


def test_operators_of_other_threads_end_before_a_session_of_all_threads_does(run: Run) -> None:
    run(
        """
        backend = TorchBackend(ProfileConfig(torch=TorchConfig(all_threads=True)))
        over = threading.Event()
        def train():
            weight = torch.randn(300, 300, requires_grad=True)
            while not over.is_set():
                (weight @ weight @ weight).sum().backward()
        threads = [threading.Thread(target=train) for _ in range(3)]
        [thread.start() for thread in threads]
        for _ in range(20):  # torch alone crashes within ten
            start()
            [pending] = backend.stop()
            pending.discard()
        over.set()
        [thread.join() for thread in threads]
        """
    )


def test_sends_that_are_waited_for_in_the_next_capture_leave_no_scope_in_the_first(run: Run) -> None:
    run(
        """
        import torch.distributed as dist
        from stepscope.backends.torch import record_function_scopes
        store, tensor = dist.HashStore(), torch.ones(8)
        def receive(count):
            there = dist.ProcessGroupGloo(store, 1, 2)
            for tag in range(count):
                there.recv([torch.empty(8)], 0, tag).wait()
        sends = iter(range(300))
        receiver = threading.Thread(target=receive, args=(300,))
        receiver.start()
        here = dist.ProcessGroupGloo(store, 0, 2)
        send = record_function_scopes.unrecorded(lambda: here.send([tensor], 1, next(sends)))
        open_sends = []
        for _ in range(3):
            start()
            for sent in open_sends:
                sent.wait()
            open_sends = [send() for _ in range(100)]
            torch.sin(tensor)
            found = write(backend.stop())
            assert "aten::sin" in found and "gloo:send" not in found
        for sent in open_sends:
            sent.wait()
        receiver.join()
        """
    )


def test_a_profile_that_is_off_ends_no_scope(run: Run) -> None:
    run(
        """
        backend.start(a_window())
        with torch.profiler.record_function("whole"):
            with torch.autograd.profiler.profile(enabled=False):
                work("before")
            work("after")
        [one] = backend.stop()
        one.write(Path("ours.json"))
        events = json.loads(Path("ours.json").read_text())["traceEvents"]
        ends = {event["name"]: event["ts"] + event["dur"] for event in events if event["ph"] == "X"}
        assert ends["whole"] >= ends["after"]
        """
    )


SCOPED = """
import torch

def scoped(x):
    with torch.autograd.profiler.record_function("compiled"):
        return x + 1
"""


def test_torch_still_compiles_a_scope(run: Run, tmp_path: Path) -> None:
    (tmp_path / "scoped.py").write_text(SCOPED)  # TorchScript reads the source
    run(
        """
        backend.prepare()
        sys.path.insert(0, ".")
        from scoped import scoped
        assert torch.jit.script(scoped)(torch.ones(1)).item() == 2
        assert torch.compile(scoped, backend="eager")(torch.ones(1)).item() == 2
        """
    )
