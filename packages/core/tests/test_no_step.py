"""The last line of a program in which no step begins, or none is captured, and of one whose steps are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope_report.cli import app as main

pytestmark = pytest.mark.slow

LOOP = """
class Loop:
    def train(self, steps):
        for _ in range(steps):
            self.step()
    def step(self):
        self.update()
    def update(self):
        pass
"""
PROGRAM = """
import json, loop
loop.Loop().train(3)
print(json.dumps({"hidden": __import__("hidden").seen}))
"""


def test_stepscope_run_captures_the_steps_of_a_program_that_knows_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "hidden.py").write_text("seen = False")
    (tmp_path / "sitecustomize.py").write_text("import hidden; hidden.seen = True")
    (tmp_path / "stepscope.yaml").write_text(
        "steps: [1]\nroles: {nobody: {ranks: all}}\ninstrument:\n"
        "- {module: loop, name: Loop.step, step: around}\n- {module: loop, name: Loop.update, role: actor}\n"
    )
    command = ["-m", "stepscope", "run", "--config", "stepscope.yaml", "--save-path", "run", "train.py"]
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {"hidden": True}
    assert [path.name for path in (tmp_path / "run").glob("step_*")] == ["step_000001"]
    (spans,) = (tmp_path / "run").glob("step_000001/spans/*.jsonl")
    assert '"stage":"update"' in spans.read_text()


ENTRIES = """
roles: {nobody: {ranks: all}}
instrument:
- {module: loop, name: Loop.step, step: around}
- {module: loop, name: Loop.update, role: actor}
- {module: other_loop, name: Loop.step, step: begin}
"""


def launch(
    folder: Path, program: str, *words: str, entries: str = ENTRIES, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """`stepscope run` of a program beside `loop.py`."""
    (folder / "loop.py").write_text(LOOP)
    (folder / "train.py").write_text(program)
    (folder / "stepscope.yaml").write_text(entries)
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = ["-m", "stepscope", "run", "--config", "stepscope.yaml", "--save-path", "run", *words]
    return subprocess.run(
        [sys.executable, *command, *([] if words else ["train.py"])],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "STEPSCOPE_RAISE": "0"},
        capture_output=True,
        text=True,
        check=check,
    )


def test_a_step_boundary_that_never_fires_is_said_once_at_the_end(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, loop\nsubprocess.run([sys.executable, '-c', 'import loop'], check=True)\n"
    )
    done = launch(tmp_path, program)
    (line,) = [line for line in done.stderr.splitlines() if "no step began" in line]
    assert re.search(r"Loop\.step .*called", line)
    assert "other_loop:Loop" in line
    assert "list under `instrument`" in line


def test_a_boundary_that_a_child_process_calls_is_no_silence(tmp_path: Path) -> None:
    """The steps that are selected never come, and still the loop was found."""
    program = (
        "import subprocess, sys, loop\n"
        "subprocess.run([sys.executable, '-c', 'import loop; loop.Loop().train(2)'], check=True)\n"
    )
    done = launch(tmp_path, program, entries="steps: [90]\n" + ENTRIES)
    assert "no step began" not in done.stderr
    assert "`steps` selects 90" in done.stderr.splitlines()[-1]
    assert main.run(["ls", str(tmp_path / "run")]) != 0


def test_a_boundary_whose_condition_never_holds_says_how_often_it_was_called(tmp_path: Path) -> None:
    entries = "instrument:\n- {module: loop, name: Loop.train, step: around, where: {steps: 7}}\n"
    done = launch(tmp_path, "import loop\nloop.Loop().train(3)\n", entries=entries)
    assert "in 1 calls" in done.stderr


def test_a_program_that_is_no_python_leaves_it_to_the_python_that_it_starts(tmp_path: Path) -> None:
    done = launch(tmp_path, "import loop\n", "sh", "-c", f"{sys.executable} train.py; true")
    assert done.stderr.count("no step began") == 1


ON_RAY = """
import os, sys, ray
ray.init(address={address!r}, log_to_driver=False)
variables = {{name: text for name, text in os.environ.items() if name[:5] == "STEPS" or name == "PYTHONPATH"}}
variables["STEPSCOPE_SAVE_PATH"] = {elsewhere!r}

@ray.remote(num_cpus=0, runtime_env={{"env_vars": variables}})
def loop(steps):
    import loop
    loop.Loop().train(steps)

ray.get(loop.remote({steps}))
"""


@pytest.mark.parametrize("elsewhere", ["run", "elsewhere"])
def test_a_loop_on_a_ray_host_leaves_its_mark_in_the_folder_that_is_there(
    tmp_path: Path, ray_cluster: None, elsewhere: str
) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    program = ON_RAY.format(address=address, elsewhere=str(tmp_path / elsewhere), steps=2)
    done = launch(tmp_path, program, entries="steps: [0]\n" + ENTRIES)
    assert (tmp_path / elsewhere / "step_000000").exists()
    assert "step was captured" not in done.stderr
    assert ("no step began" in done.stderr) == (elsewhere != "run")


INHERITED = """
import ray

class Base:
    def begin(self):
        pass

    def save(self, global_step):
        pass

    def update(self):
        pass

@ray.remote(num_cpus=0)
class Trainer(Base):
    def fit(self, steps):
        self.begin()
        for step in range(1, steps):
            self.update()
            self.save(step)
"""
FIT = """
import os, sys, ray, inherited
ray.init(address={address!r}, log_to_driver=False)
variables = {{name: text for name, text in os.environ.items() if name[:5] == "STEPS" or name == "PYTHONPATH"}}
trainer = inherited.Trainer.options(runtime_env={{"env_vars": variables}}).remote()
ray.get(trainer.fit.remote({steps}))
"""


@pytest.mark.parametrize("steps", [3, 0])
def test_a_loop_that_an_actor_inherits_has_its_steps_captured(
    tmp_path: Path, ray_cluster: None, steps: int
) -> None:
    import ray

    (tmp_path / "inherited.py").write_text(INHERITED)
    condition = "" if steps else ", where: {self.is_ready: true}"
    entries = (
        "steps: [1]\nrecord: off\nroles: {'*': {profiler: off}}\ninstrument:\n"
        f"- {{module: inherited, name: Base.begin, step: begin{condition}}}\n"
        "- {module: inherited, name: Base.save, step: next, number: global_step}\n"
        "- {module: inherited, name: Base.update, role: actor}\n"
    )
    address = ray.get_runtime_context().gcs_address
    done = launch(tmp_path, FIT.format(address=address, steps=steps), entries=entries)
    if steps:
        assert [path.name for path in (tmp_path / "run").glob("step_*")] == ["step_000001"]
        (spans,) = (tmp_path / "run").glob("step_000001/spans/*.jsonl")
        assert spans.read_text().count('"stage":"update"') == 1
    else:
        (line,) = [line for line in done.stderr.splitlines() if "no step began" in line]
        assert "never called" not in line  # the actor called it


FITS = "import loop\nloop.Loop().train(3)\n"


BLOCKED = """
import asyncio, loop, ray, sys

async def train(steps):
    for step in range(steps):
        loop.Loop().step()

loop.Loop.workers = [object()]
asyncio.run(train(3))
print("the end", file=sys.stderr)
"""


@pytest.mark.parametrize("words", [[], ["--require-capture", "train.py"]], ids=["plain", "required"])
def test_selected_steps_that_could_not_be_captured_have_the_first_reason_and_its_fix_in_the_last_line(
    tmp_path: Path, words: list[str]
) -> None:
    pytest.importorskip("ray")
    entries = "instrument:\n- {module: loop, name: Loop.step, step: around, workers: {actor: self.workers}}\n"
    done = launch(tmp_path, BLOCKED, *words, entries="steps: [1, 2]\n" + entries, check=False)
    assert done.returncode == (4 if words else 0)
    assert "step was captured: " in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "event loop. Fix: " in last


@pytest.mark.parametrize(
    ("steps", "end", "code"),
    [("[1]", "", 0), ("[7]", "", 4), ("[7]", "raise SystemExit(9)", 9)],
    ids=["captured", "uncaptured", "program-failed"],
)
def test_a_run_that_requires_a_capture_has_an_exit_code_without_one(
    tmp_path: Path, steps: str, end: str, code: int
) -> None:
    entries = f"steps: {steps}\n" + ENTRIES
    done = launch(tmp_path, FITS + end, "--require-capture", "train.py", entries=entries, check=False)
    assert done.returncode == code
    assert ("--require-capture: " in done.stderr.splitlines()[-1]) == (code == 4)


def test_a_run_that_requires_a_capture_passes_signals_on(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "signal.pause()\n"
    )
    entries = "steps: [1]\n" + ENTRIES
    done = launch(tmp_path, program, "--require-capture", "train.py", entries=entries, check=False)
    assert done.returncode == 5


def test_what_is_not_reached_is_named_when_the_second_step_begins(tmp_path: Path) -> None:
    (tmp_path / "unused.py").touch()
    program = (
        "import sys, loop\n"
        "for step in range(3):\n"
        "    print('step', step, file=sys.stderr, flush=True)\n"
        "    loop.Loop().step()\n"
    )
    unused = "- {module: unused, name: f, role: actor}\n- {module: loop, name: Loop.train, step: end}\n"
    done = launch(tmp_path, program, entries="steps: [2]\n" + ENTRIES + unused)
    lines = done.stderr.splitlines()
    (named,) = [line for line in lines if "not reached by the second step" in line]
    assert lines.index("step 1") < lines.index(named) < lines.index("step 2")
    assert "unused:f was not" in named
    assert "loop:Loop.train " in named
    assert " loop:Loop.step" not in named


def test_the_ranks_of_a_launcher_say_it_once(tmp_path: Path) -> None:
    shell = f"for rank in 0 1 2; do RANK=$rank {sys.executable} train.py; done"
    done = launch(tmp_path, "import loop\n", "sh", "-c", shell)
    assert done.stderr.count("no step began") == 1


def test_a_program_that_configures_itself_hears_of_it_too(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    program = (
        "import stepscope, sys\n"
        "entry = {'module': 'loop', 'name': 'Loop.step', 'step': 'around'}\n"
        "stepscope.configure(save_path=sys.argv[1], steps=[1], instrument=[entry])\n"
        "import loop\n"
        "for step in range(int(sys.argv[2])):\n"
        "    with stepscope.capture(step): pass\n"
    )
    (tmp_path / "own.py").write_text(program)
    for captures, expected in (("0", 1), ("1", 0)):
        done = subprocess.run(
            [sys.executable, "own.py", str(tmp_path / captures), captures],
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stderr.count("no step began") == expected


def test_a_patched_function_that_no_process_called_in_a_captured_step_is_named_in_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = ENTRIES + "- {module: loop, name: Loop.train, role: trainer, stage: fit}\n"
    program = "import loop\nloop.Loop().step()\nloop.Loop().train(1)\n"
    launch(tmp_path, program, entries="steps: [0]\n" + entries)
    main.run(["report", str(tmp_path / "run"), "--json"])
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    assert step["health"]["uncalled"] == ["loop:Loop.train (trainer/fit)"]
    main.run(["report", str(tmp_path / "run")])
    assert "Instrumented, without" in capsys.readouterr().out
    assert "loop:Loop.train" in (tmp_path / "run" / "step_000000" / "report.html").read_text()
