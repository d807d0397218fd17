"""The nsys backend under a stand-in for nsys. Never run beside a real one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from stepscope import ProfileConfig, capture, prepare
from stepscope.backends import SpanInfo, Window, nsys
from stepscope.backends.nsys import NsysBackend, command, option, runtime_env
from stepscope.backends.process_lock import PROCESS_LOCK
from stepscope.errors import BackendError, CaptureError, ConfigError, ProfilerBusyError
from stepscope.files.layout import RunLayout
from stepscope.files.manifest.parts import fold, read_parts
from stepscope.files.sidecar import ProcessInfo, Sidecar

HERE = Path(__file__).resolve().parent
STANDIN = HERE / "nsys_standin.py"

PROGRAM = """
import os, sys
from stepscope import capture, configure, flush, profile_step

def work(text):
    with open(os.environ["STANDIN_WORK"], "a") as file:
        file.write(text + "\\n")

@profile_step(role="actor")
def update(step):
    work(f"update {step}")

configure(
    save_path=sys.argv[1], steps=[1, 3], tool="nsys", mode=sys.argv[2],
    nsys={"report_seconds": float(sys.argv[3])}, roles={"actor": {"ranks": "all"}},
)
for step in range(4):
    work(f"before {step}")
    with capture(step, role="actor", rank=0) as cap:
        update(step)
    work(f"after {step}")
print("unwritten", flush(60))
"""


@pytest.fixture(scope="module")
def cudart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed, and the stand-in's libcudart.so is made with it")
    sys.path.insert(0, str(HERE))
    try:
        from nsys_standin import build_cudart  # type: ignore[import-not-found,unused-ignore]  # beside this file
    finally:
        sys.path.remove(str(HERE))
    library: Path = build_cudart(tmp_path_factory.mktemp("cudart"))
    return library


def run_under_nsys(
    tmp_path: Path, cudart: Path, *, mode: str = "continuous", words: list[str] | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    nsys_words = command(ProfileConfig(), str(tmp_path / "reports_%p"))[2:] if words is None else words
    script = tmp_path / "bin" / "nsys"  # it is found by its name
    script.parent.mkdir()
    shutil.copy(STANDIN, script)
    return subprocess.run(
        [
            sys.executable,
            str(script),
            "profile",
            *nsys_words,
            sys.executable,
            str(program),
            str(tmp_path / "run"),
            mode,
            environ.pop("report_seconds", "60"),
        ],
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(cudart.parent),
            "STANDIN_RANGES": str(tmp_path / "ranges"),
            "STANDIN_WORK": str(tmp_path / "work"),
            "STEPSCOPE_RAISE": "0",
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )


def reports_of(tmp_path: Path, step: int) -> list[str]:
    folder = RunLayout(tmp_path / "run").step(step).traces
    return [path.read_text() for path in sorted(folder.rglob("*.nsys-rep"))]


def reasons(tmp_path: Path, step: int) -> str:
    manifest = fold(read_parts(RunLayout(tmp_path / "run").step(step))[0])  # as of now, exports included
    return "\n".join(
        f"{item.name}: {item.state} {item.reason}" for part in manifest.processes for item in part.expected
    )


def test_v11_each_captured_step_gets_the_whole_report_of_its_own_range_the_last_too(
    tmp_path: Path, cudart: Path
) -> None:
    done = run_under_nsys(tmp_path, cudart)
    assert done.returncode == 0, done.stderr
    assert "unwritten []" in done.stdout
    assert [reports_of(tmp_path, step) for step in (1, 3)] == [
        ["report\nupdate 1\nend"],
        ["report\nupdate 3\nend"],
    ]
    assert list(tmp_path.glob("*.nsys-rep")) == []  # moved, not copied


def test_its_sidecar_says_what_it_is(tmp_path: Path, cudart: Path) -> None:
    run_under_nsys(tmp_path, cudart)
    (path,) = RunLayout(tmp_path / "run").step(1).sidecars()
    artifact = msgspec.json.decode(path.read_bytes(), type=Sidecar).artifact
    assert (artifact.kind, artifact.tool, artifact.role, artifact.rank) == ("nsys_report", "nsys", "actor", 0)


def test_in_discrete_mode_a_stage_is_a_range(tmp_path: Path, cudart: Path) -> None:
    done = run_under_nsys(tmp_path, cudart, mode="discrete")
    assert done.returncode == 0, done.stderr
    assert reports_of(tmp_path, 1) == ["report\nupdate 1\nend"]
    assert "nsys trace of update: ok" in reasons(tmp_path, 1)


def test_a_report_that_never_comes_is_failed_with_where_to_look(tmp_path: Path, cudart: Path) -> None:
    words = [
        "--trace=cuda",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--output=only_%p",
    ]
    done = run_under_nsys(tmp_path, cudart, words=words, report_seconds="3")
    assert done.returncode == 0, done.stderr
    assert reports_of(tmp_path, 1) == ["report\nupdate 1\nend"]  # `stop` ends nsys with the first range
    assert reports_of(tmp_path, 3) == []
    assert "failed" in reasons(tmp_path, 3)
    assert "nsys wrote no complete report" in reasons(tmp_path, 3)


def test_without_a_capture_range_it_says_which_option_to_add(tmp_path: Path, cudart: Path) -> None:
    done = run_under_nsys(tmp_path, cudart, words=["--trace=cuda", "--output=all_%p"])
    assert done.returncode == 0, done.stderr
    assert "--capture-range=cudaProfilerApi --capture-range-end=repeat" in reasons(tmp_path, 1)


def test_a_range_that_cuda_refuses_is_failed_and_the_run_goes_on(tmp_path: Path, cudart: Path) -> None:
    done = run_under_nsys(tmp_path, cudart, STANDIN_REFUSES="1")
    assert done.returncode == 0, done.stderr
    assert "cudaProfilerStart returned 8" in reasons(tmp_path, 1)


# In this process --------------------------------------------------------------------------------------------


def test_the_fix_is_whole_in_what_prepare_raises_and_in_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(nsys.SESSION, raising=False)
    config = ProfileConfig(save_path=tmp_path / "run", steps=[1], tool="nsys")
    with pytest.raises(CaptureError, match=r"Fix: on Ray, .* python train\.py`$"):
        prepare(config=config)
    with capture(1, config=config):
        pass
    assert "--output=stepscope_%p python train.py`" in reasons(tmp_path, 1)


def test_a_process_that_nsys_did_not_start_is_told_how_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(nsys.SESSION, raising=False)
    with pytest.raises(
        BackendError, match=r"runtime_env\(config\)\); elsewhere `nsys profile --trace=cuda,nvtx"
    ):
        NsysBackend(ProfileConfig()).check()


def test_what_ray_starts_the_worker_with() -> None:
    config = ProfileConfig(nsys={"trace": ["cuda", "nvtx", "osrt"], "extra": {"cuda-memory-usage": "true"}})
    assert runtime_env(config) == {
        "nsight": {
            "trace": "cuda,nvtx,osrt",
            "capture-range": "cudaProfilerApi",
            "capture-range-end": "repeat",
            "kill": "none",
            "cuda-memory-usage": "true",
            "o": "'stepscope_%p'",
        }
    }


@pytest.mark.needs("ray")
def test_ray_itself_turns_these_options_into_a_command_line() -> None:
    from ray._private.runtime_env.nsight import parse_nsight_config

    words = parse_nsight_config(nsys.nsight_options(ProfileConfig()) | {"o": "'stepscope_%p'"})
    assert words[:2] == ["nsys", "profile"]
    assert option(words, "capture-range", "c") == "cudaProfilerApi"
    assert option(words, "output", "o") == "'stepscope_%p'"


@pytest.mark.parametrize("words", [["--output=a"], ["--output", "a"], ["-o", "a"], ["-o=a"]])
def test_an_option_is_found_however_it_is_written(words: list[str]) -> None:
    assert option(["nsys", "profile", *words, "python"], "output", "o") == "a"


def test_an_unknown_thing_to_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nsys\.trace is \['cuad'\]; allowed: a list of 'cuda'"):
        ProfileConfig(nsys={"trace": ["cuad"]})


class Cudart:
    """Counts ranges."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def cudaProfilerStart(self) -> int:  # noqa: N802
        self.calls.append("start")
        return 0

    def cudaProfilerStop(self) -> int:  # noqa: N802
        self.calls.append("stop")
        return 0


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NsysBackend]:
    api = Cudart()
    monkeypatch.setattr(nsys, "_profiler_api", lambda: api)
    made = NsysBackend(ProfileConfig(nsys={"output": str(tmp_path / "r_%p"), "report_seconds": 0.5}))
    yield made
    made.stop()
    assert PROCESS_LOCK.holder is None
    assert api.calls == ["start", "stop"] * (len(api.calls) // 2)


def a_window() -> Window:
    process = ProcessInfo(role="actor", rank=0, world_size=1, host="here", pid=os.getpid())
    return Window(step=2, process=process, stage=None, index=0)


def test_a_second_start_is_refused_and_the_range_goes_on(backend: NsysBackend) -> None:
    backend.start(a_window())
    with pytest.raises(ProfilerBusyError, match="step 2 is being recorded"):
        backend.start(a_window())
    assert len(backend.stop()) == 1
    assert backend.stop() == []


def test_a_ctrl_c_while_the_device_is_waited_for_leaves_the_range_to_a_second_stop(
    backend: NsysBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    backend.start(a_window())
    with monkeypatch.context() as interrupting:
        interrupting.setattr(nsys, "_synchronize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            backend.stop()
    assert len(backend.stop()) == 1


def test_torch_profiler_cannot_start_beside_it(backend: NsysBackend) -> None:
    backend.start(a_window())
    with pytest.raises(ProfilerBusyError, match="the nsys range of step 2"):
        PROCESS_LOCK.acquire("a torch trace")


def test_markers_are_ranges_of_the_real_nvtx_that_are_closed_by_id(
    backend: NsysBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvtx = pytest.importorskip("nvtx")
    opened: list[tuple[dict[str, str], object]] = []
    closed: list[object] = []
    start, end = nvtx.start_range, nvtx.end_range

    def start_range(**words: str) -> object:
        opened.append((words, made := start(**words)))
        return made

    def end_range(made: object) -> None:
        closed.append(made)
        end(made)

    monkeypatch.setattr(nvtx, "start_range", start_range)
    monkeypatch.setattr(nvtx, "end_range", end_range)
    backend.start(a_window())
    with backend.range(SpanInfo(stage="update", role="actor", span=1, is_async=False)):
        pass
    ((words, made),) = opened
    assert words == {"message": "actor.update", "domain": "stepscope"}
    assert closed == [made]


def test_without_nvtx_the_report_lacks_markers_and_says_so(
    backend: NsysBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nsys, "_nvtx", lambda: None)
    backend.start(a_window())
    with backend.range(SpanInfo(stage="update", role="actor", span=1, is_async=False)):
        pass
    (pending,) = backend.stop()
    assert "pip install 'stepscope[nsys]'" in str(pending.lacking)
