"""`stepscope run` starts an unedited program whose framework is instrumented. `stepscope validate` shows the
effect of a configuration.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer
from rich.text import Text

from stepscope import integrations
from stepscope.config import (
    RESERVED_VARIABLES,
    ProfileConfig,
    check_finish,
    check_program,
    check_recorder,
    check_save_path,
    check_tool,
    resolve,
)
from stepscope.files import switch
from stepscope.files.layout import CAPTURED, FAILED, RunLayout
from stepscope_report.cli import screen
from stepscope_report.cli.command import CommandError, Exit
from stepscope_report.terminal_blocks import listing

STARTUP = Path(integrations.__file__).parent / "startup"
RUN_PID = "STEPSCOPE_RUN_PID"
"""Environment variable with the id of the process that warns at its end if no step began. See
`_recording.instrument.no_step`."""


def run(
    command: Annotated[
        list[str] | None, typer.Argument(help="The program and its arguments: train.py, torchrun ...")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="The configuration; else STEPSCOPE_CONFIG.")] = None,
    preset: Annotated[
        list[str] | None, typer.Option(help="A framework whose functions are known: trl, verl...")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Steps to capture: 2, 3-7, 10:50:10, every:50.")] = None,
    save_path: Annotated[Path | None, typer.Option(help="The run's folder.")] = None,
    print_env: Annotated[
        bool, typer.Option("--print-env", help="Print the variables as JSON instead, for a Ray runtime_env.")
    ] = False,
    require_capture: Annotated[
        bool, typer.Option("--require-capture", help="End with exit code 4 if no step was captured.")
    ] = False,
) -> None:
    """Start a program without editing it, and capture its steps.

    Every Python process that the program starts, directly or not, is instrumented as the configuration's
    `instrument` list and the presets say. The command ends with the program's exit code. With
    `--require-capture`, the exit code is 4 if the program succeeded but no step was captured.
    """
    if switch.DISABLED and command:
        screen.say(f"{switch.VARIABLE} is set: the program runs as if stepscope were not installed")
        _become(command, os.environ)
    resolved, variables = _resolve(config, preset or [], steps, save_path)
    if print_env:
        screen.show_json(variables)
        raise typer.Exit(Exit.OK)
    if not command:
        raise CommandError("there is no program to run. Fix: stepscope run --preset trl train.py", Exit.USAGE)
    check_program(resolved, command)
    if not resolved.steps:
        screen.say(
            "`steps` selects nothing: steps are captured once they are asked for (`stepscope trigger`)"
        )
    if require_capture:
        _require_capture(resolved, command, {**os.environ, **variables})
    _become(command, {**os.environ, **variables, RUN_PID: str(os.getpid())})


def _require_capture(config: ProfileConfig, command: list[str], environ: Mapping[str, str]) -> NoReturn:
    """Run the program as a child, and exit with its exit code, or with 4 if it succeeded but captured no
    step.
    """
    if not config.steps:
        fix = "select the steps (--steps 2), or leave out --require-capture"
        raise CommandError(f"--require-capture: `steps` selects nothing. Fix: {fix}")
    code = _run_child(command, environ)
    outcome = RunLayout(config.save_path).outcome(environ["STEPSCOPE_RUN_ID"])
    if code == 0 and CAPTURED not in outcome:
        reason = outcome.get(FAILED, "see the line above, or `stepscope ls` on the host of the loop")
        message = f"--require-capture: no step was captured in {config.save_path}: {reason}"
        raise CommandError(message, Exit.UNCAPTURED)
    raise typer.Exit(code)


def _run_child(command: list[str], environ: Mapping[str, str]) -> int:
    """Run the program, and forward to it the signals that this process receives. Return the exit code as a
    shell would.
    """
    command = _with_python(command)
    if shutil.which(command[0], path=environ.get("PATH")) is None:
        raise CommandError(f"cannot run {command[0]!r}: No such file or directory")
    sys.stdout.flush()
    # The shell becomes the program and keeps its process id, which the variable then holds.
    child = subprocess.Popen(["sh", "-c", f'{RUN_PID}=$$ exec "$0" "$@"', *command], env=environ)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda got, _: child.send_signal(got))
    signal.signal(signal.SIGINT, lambda *_: None)  # the terminal also sends it to the child
    code = child.wait()
    return 128 - code if code < 0 else code


def _with_python(command: list[str]) -> list[str]:
    return [sys.executable, *command] if command[0].endswith(".py") else command


def _become(command: list[str], environ: Mapping[str, str]) -> NoReturn:
    command = _with_python(command)
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        raise CommandError(f"cannot run {command[0]!r}: {error.strerror}", Exit.USAGE) from None


def _resolve(
    file: Path | None, presets: list[str], steps: str | None, save_path: Path | None
) -> tuple[ProfileConfig, dict[str, str]]:
    """Return (configuration as the program will resolve it, environment variables that carry it)."""
    variables = {"STEPSCOPE_RUN_ID": os.environ.get("STEPSCOPE_RUN_ID") or os.urandom(4).hex()}
    if file is not None:
        variables["STEPSCOPE_CONFIG"] = str(file.absolute())
    if steps is not None:
        variables["STEPSCOPE_STEPS"] = steps
    named = resolve(environ={**os.environ, **variables})
    # absolute, because workers have another current folder
    variables["STEPSCOPE_SAVE_PATH"] = str((save_path or Path(named.save_path)).absolute())
    given = resolve(None, {"STEPSCOPE_INSTRUMENT": ",".join(presets)}).instrument
    listed = [*named.instrument, *(entry for entry in given if entry not in named.instrument)]
    if not listed:
        fix = "name the framework (--preset trl), or list functions under `instrument` in the configuration"
        raise CommandError(f"there is nothing to instrument. Fix: {fix}", Exit.USAGE)
    plain = named.replace(instrument=listed).to_mapping()["instrument"]
    variables["STEPSCOPE_INSTRUMENT"] = json.dumps(plain)
    config = resolve(environ={**os.environ, **variables})
    check_tool(config)
    check_save_path(config, on_ray=False)
    paths = [str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
    return config, {**variables, "PYTHONPATH": os.pathsep.join(paths)}


class Validated(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `stepscope validate --json`."""

    format: int = 1
    config: dict[str, object]
    """The resolved configuration: the defaults, changed by the file, then by the environment."""
    environment: list[str]
    """Environment variables that replaced values of the file."""
    steps: list[int]
    """Selected steps that are smaller than the option `below`."""
    below: int


def validate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML or JSON file.")],
    program: Annotated[
        list[str] | None, typer.Argument(metavar="[PROGRAM]", help="As for `stepscope run`: train.py.")
    ] = None,
    below: Annotated[int, typer.Option(help="List the selected steps with smaller numbers.", min=1)] = 100,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show the configuration as a run on this machine would resolve it and the steps it selects, or its
    errors.
    """
    resolved = resolve(config)
    check_tool(resolved)
    check_recorder(resolved)
    check_finish(resolved)
    check_program(resolved, program or ())
    validated = Validated(
        config=resolved.to_mapping(),
        environment=sorted(
            n for n in os.environ if n.startswith("STEPSCOPE_") and n not in RESERVED_VARIABLES
        ),
        steps=[step for step in range(below) if resolved.selects(step)],
        below=below,
    )
    if json:
        screen.show_json(validated)
    else:
        _show(validated)


def _show(validated: Validated) -> None:
    import yaml

    screen.show(Text(yaml.safe_dump(validated.config, sort_keys=False).rstrip()))
    if validated.environment:
        screen.show(listing("Set by the environment, over the file", validated.environment))
    steps, below = ", ".join(map(str, validated.steps)), validated.below
    line = f"{steps} (of those below {below})" if steps else f"none below {below}"
    screen.show(listing("Selected steps", [line]))
    if not validated.config["steps"]:
        screen.say("`steps` selects nothing: a run with this configuration records nothing.")
