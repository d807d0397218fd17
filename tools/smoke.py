"""Test a fresh installation: installed extras work, and the error of an absent extra names the extra.

    python smoke.py FOLDER EXTRA ...

`tools/release.py` runs this script in an environment for each combination of extras, outside of the checkout.
FOLDER must be empty. The script imports only the standard library and stepscope.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

NEEDED = {
    "cli": ("typer", "rich", "stringzilla"),
    "ray": ("ray", "stepscope._recording.fanout.ray_fleet"),
    "vllm": ("stepscope_vllm._profiler",),
    "sglang": ("stepscope_sglang._profiler",),
    "npu": ("stepscope_npu._backend", "stepscope_npu._analysis"),
    "counters": ("pynvml",),
    "nsys": ("nvtx",),
    "mcp": ("mcp",),
    "parquet": ("pyarrow.parquet",),
    "tensorboard": ("tensorboard.summary",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow.tracking",),
    "otel": ("stepscope_report.writers.otel",),
}
"""{extra: modules that the extra makes importable}. The extra `all` is all of these."""
WRITERS = ("tensorboard", "wandb", "mlflow", "otel")
READING = {"cli", "mcp", "parquet", *WRITERS}
"""Extras that install stepscope-report."""
BESIDES = {"otel": ("wandb", "mlflow")}
"""{writer: other extras that install the packages which the writer imports}."""
ADAPTERS = {"vllm": "stepscope.engines", "sglang": "stepscope.engines", "npu": "stepscope.backends"}
"""{extra: the group of entry points in which the extra's adapter is registered}."""


def main(folder: Path, extras: set[str]) -> None:
    extras = set(NEEDED) if "all" in extras else extras
    check_package()
    check_modules(extras)
    check_writers(extras, folder / "run")
    check_adapters(extras)
    check_capture(folder / "run", reported=bool(extras & READING))
    if extras & READING:
        check_command(folder)
    else:
        check_command_absent()
    if "tensorboard" in extras:
        check_curves(folder)


def check_package() -> None:
    """Check that the imported stepscope is the installed package and not a checkout."""
    import stepscope

    assert "site-packages" in (stepscope.__file__ or ""), stepscope.__file__
    assert find_spec("torch") is None, "no extra may bring torch"


def check_modules(extras: set[str]) -> None:
    for extra in sorted(extras):
        for module in NEEDED[extra]:
            import_module(module)


def check_writers(extras: set[str], run: Path) -> None:
    """Check that the configuration accepts installed writers, and names the extra of other writers."""
    from stepscope import configure
    from stepscope.errors import ConfigError

    for name in WRITERS:
        refusal = ""
        try:
            configure(save_path=run, finish={"report_to": [name]})
        except ConfigError as error:
            refusal = str(error)
        assert not (refusal and name in extras), refusal
        brought = extras & {name, *BESIDES.get(name, ())}
        assert refusal or brought, f"{name} is said to work, and nothing brings it"
        assert not refusal or f"pip install 'stepscope[{name}]'" in refusal, refusal


def check_adapters(extras: set[str]) -> None:
    """Check that the adapters of `extras` are registered, and no others."""
    for extra, group in ADAPTERS.items():
        names = {point.name for point in entry_points(group=group)}
        assert (extra in names) == (extra in extras), (extra, names)


def check_capture(run: Path, reported: bool) -> None:
    """Capture a step without torch, and report on the step if stepscope-report is installed (`reported`)."""
    import stepscope

    assert bool(find_spec("stepscope_report")) == reported
    stepscope.configure(save_path=run, steps=[1], roles={"*": {"profiler": "off"}})
    with stepscope.capture(1, workers={}) as capture, stepscope.span("update_actor", role="actor"):
        pass
    stepscope.flush()
    assert capture.result.path is not None
    assert list((capture.result.path / "spans").glob("trainer_*.jsonl"))
    if not reported:
        return
    from stepscope_report import step_report
    from stepscope_report.timeline import load_step

    report = step_report(load_step(capture.result.path))
    assert "update_actor" in str(report.breakdown), report.breakdown


def check_command(folder: Path) -> None:
    """Run `stepscope --version`, `doctor`, `report --sample` and `merge`."""
    import stepscope

    assert command("--version").stdout == f"stepscope {stepscope.__version__}\n"
    rows = json.loads(command("doctor", "--json").stdout)["rows"]
    assert not [row for row in rows if row["state"] == "red"], rows
    assert "decode" in command("report", "--sample", str(folder / "sample")).stdout
    assert (folder / "sample" / "report.html").stat().st_size > 10_000
    command("merge", str(folder / "sample" / "step_000001"))


def check_command_absent() -> None:
    """Check that, without the extra `cli`, `python -m stepscope` fails and names this extra."""
    assert not Path(sys.executable).with_name("stepscope").exists()
    outcome = run(sys.executable, "-m", "stepscope", "--version", code=2)
    assert "Fix: pip install 'stepscope[cli]'" in outcome.stderr, outcome.stderr
    assert not outcome.stdout


def check_curves(folder: Path) -> None:
    """Publish the figures of the sample to TensorBoard, and check that it wrote a file."""
    command("publish", str(folder / "sample"), "--to", "tensorboard")
    assert list((folder / "sample" / "tensorboard").rglob("events.out.tfevents.*"))


def command(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the console script beside this Python."""
    return run(str(Path(sys.executable).with_name("stepscope")), *arguments, code=code)


def run(*words: str, code: int) -> subprocess.CompletedProcess[str]:
    """Run a program without variables of stepscope. Fail unless the program exits with `code`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STEPSCOPE")}
    outcome = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert outcome.returncode == code, (words, outcome.returncode, outcome.stdout[-2000:], outcome.stderr)
    return outcome


if __name__ == "__main__":
    main(Path(sys.argv[1]), set(sys.argv[2:]))
