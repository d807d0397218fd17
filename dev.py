"""All commands for working on this repository. `python3 dev.py` lists them.

You need Python 3.10 or newer with pip, and nothing else. Each command makes the virtual environment that it
needs (`.venv`) at its first use. This file and the modules of `tools` that it imports use only the standard
library.
"""

import sys

# This check is before all other imports, and Python 3.6 can parse this file, so that an old Python gets here.
if sys.version_info < (3, 10):
    import shutil
    import subprocess

    named = [shutil.which("python3.{}".format(minor)) for minor in range(14, 9, -1)]
    newer = [
        path for path in named if path and not subprocess.call([path, "-c", ""], stderr=-3)
    ]  # -3: DEVNULL
    fix = "run `{} {}`".format(newer[0], " ".join(sys.argv)) if newer else "install Python 3.10 or newer"
    current = "{} is {}".format(sys.executable, sys.version.split()[0])
    sys.exit("dev.py needs Python 3.10 or newer; {}. Fix: {}".format(current, fix))

import signal
from collections.abc import Callable, Mapping
from contextlib import nullcontext

from tools import processes
from tools.bump import bump
from tools.engine_environments import engines, left_to_request, newest, not_possible, unasked
from tools.engine_tests import engines_beside, other_pythons, test_engines, test_newest, test_on
from tools.environments import BENCH, DEV, RELEASE
from tools.processes import run, run_tests, say, succeeds
from tools.repository import PACKAGES, ROOT

PYTEST = ("-m", "pytest", "--slow")


def demo(arguments: list[str]) -> bool:
    """a tiny RL run on this machine, profiled, with its report. --engine vllm, sglang or vllm,sglang:
    generate with these engines"""
    python = DEV.ready()
    place = arguments.index("--engine") + 1 if "--engine" in arguments else len(arguments)
    names = [name for word in arguments[place : place + 1] for name in word.split(",")]
    if len(names) == 1:
        python = newest(names[0]).ready()
    elif names:  # each engine in its own environment, the rest of the run in `.venv`
        arguments[place] = ",".join(f"{name}={newest(name).ready()}" for name in names)
    return run(python, "-m", "stepscope", "demo", *arguments)


def test(arguments: list[str]) -> bool:
    """check, then all tests; with arguments, only pytest with these arguments. The first argument may be
    --engines [NAME ...], --newest [torch vllm ...] (the newest releases on the index), --two-engines (vLLM
    and SGLang in one run), --two-hosts (needs root), --no-engines, --pythons (the core, on each Python)"""
    first, rest = (arguments or [""])[0], arguments[1:]
    if first == "--pythons":
        passed_on = [test_on(base, rest) for base in other_pythons()]
        return all(passed_on)
    if first == "--engines":
        if set(rest) & set(engines()):
            return test_engines(rest)
        DEV.ready()  # `not_possible` looks at the torch in this environment
        for line in not_run(not_possible()):
            say(line)
        return test_engines([*(name for name in engines() if name not in not_possible()), *rest])
    if first == "--newest":
        return test_newest(rest)
    if first == "--two-engines":
        built = [newest(name).ready() for name in ("vllm", "sglang")]
        return all(built) and run(DEV.ready(), "-m", "pytest", "tests/two_engines.py", *rest)
    if first == "--two-hosts":
        newest("vllm").ready()
        return run(DEV.ready(), "-m", "pytest", "tests/two_hosts.py", *rest)
    if first == "--no-engines":
        return test_everything(rest, real=False)
    return run(DEV.ready(), *PYTEST, *arguments) if arguments else test_everything([], real=True)


def test_everything(options: list[str], real: bool) -> bool:
    """Run the check and all tests, those on real engines only if `real`. Print what failed or did not run."""
    python = DEV.ready()
    # With PYTHONDONTWRITEBYTECODE set, each of thousands of processes would compile our sources again.
    sources = [str(ROOT / "packages" / name / "src") for name in PACKAGES]
    succeeds([python, "-m", "compileall", "-q", *sources])
    with engines_beside() if real else nullcontext() as engines_passed:
        # The tests run even if the check failed, so that one run shows all faults.
        passed = {"the check": check([]), "the tests": test_in_two(python, options)}
        if engines_passed is not None:
            passed["the tests on real engines"] = engines_passed()
    for line in left_out(real):
        say(line)
    for what in (what for what, good in passed.items() if not good):
        say(f"FAILED: {what}")
    for line in processes.FAILED:  # last, because often only the end of a long log is kept
        print(line)
    return all(passed.values())


def test_in_two(python: str, options: list[str]) -> bool:
    """Run the tests in two processes, a file at a time in each. Run failed tests again in one process.

    A process that dies is not restarted: pytest-xdist would run the test that killed it nine times more, and
    leave out others.
    """
    in_two = ("-n2", "--max-worker-restart=0", "--dist=loadfile", "--no-loadscope-reorder")
    return run_tests(python, *PYTEST, *in_two, *options, again=(python, *PYTEST, *options))


def left_out(real: bool) -> list[str]:
    """Return a line for each group of tests that cannot run here, or that runs only on request."""
    two_hosts = (
        "NOT RUN: two hosts that share no folder, which takes root. Fix: `python3 dev.py test --two-hosts`"
    )
    if not real:
        return [two_hosts]
    requested = {
        name: f"{why} Fix: `python3 dev.py test --engines {name}`" for name, why in left_to_request().items()
    }
    two = "vLLM and SGLang in one run, minutes long. Fix: `python3 dev.py test --two-engines`"
    return [*not_run({**requested, **not_possible()}), f"NOT RUN: {two}", two_hosts]


def not_run(reasons: Mapping[str, str]) -> list[str]:
    """Return a line for each environment whose tests did not run."""
    return [f"NOT RUN: the tests on {name}: {why}" for name, why in reasons.items()]


def check(arguments: list[str]) -> bool:
    """ruff and mypy over everything. --fix: ruff fixes what it can, and docs/reference is generated again"""
    python = DEV.ready()
    fix = "--fix" in arguments
    passed = [
        *([run(python, "-m", "tools.reference")] if fix else []),
        run(python, "-m", "ruff", "check", *(["--fix"] if fix else [])),
        run(python, "-m", "ruff", "format", *([] if fix else ["--check"])),
        *(run(python, "-m", "mypy", *paths) for paths in typed_paths()),
    ]
    return all(passed)


def typed_paths() -> list[list[str]]:
    """Return a list of paths for each run of mypy.

    The tests of each package have a run of their own. `packages/rollout-vllm` is not a module name, so mypy
    takes two test files with one name for one module.
    """
    others = ("tests", "tools", "benchmarks", "docs", "examples", "conftest.py", "dev.py")
    sources = [f"packages/{name}/src" for name in PACKAGES]
    tests = [f"packages/{name}/tests" for name in PACKAGES]
    everything = [*sources, "packages/conftest.py", *(path for path in others if (ROOT / path).exists())]
    return [everything, *([path] for path in tests if (ROOT / path).exists())]


def bench(arguments: list[str]) -> bool:
    """all benchmarks, compared with their peers, or one by name (further arguments go to the benchmark)"""
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))
    chosen = arguments[:1] or names
    if not set(chosen) <= set(names):
        sys.exit(f"no benchmark is named {chosen[0]}; there are: {', '.join(names) or 'none'}")
    python = BENCH.ready()
    passed = [run(python, f"benchmarks/{name}.py", *arguments[1:]) for name in chosen]
    return all(passed)


def docs(arguments: list[str]) -> bool:
    """build the site of docs/ into build/site; a warning of mkdocs is an error. --serve: serve it instead"""
    python = engines()["docs"].ready()
    serve = "--serve" in arguments
    words = [word for word in arguments if word != "--serve"]
    return run(python, "-m", "mkdocs", "serve" if serve else "build", "--strict", *words)


def gpu(arguments: list[str]) -> bool:
    """everything that needs a GPU, in at most eight minutes: [--wheels DIR] [--output DIR] [--pretend];
    --fill-wheels DIR downloads for a machine without a network. Results: gpu.json, gpu.md, report.html"""
    alone = any(word.startswith(("--wheels", "--fill-wheels")) for word in arguments)
    return run(sys.executable if alone else DEV.ready(), "-m", "tools.gpu", *arguments)


def chaos(arguments: list[str]) -> bool:
    """a small trainer on Ray with a fault in every other step: [--rounds 100] [--seed N] [--recorder: with
    the flight recorder on]"""
    return run(DEV.ready(), "packages/core/tests/chaos/run.py", *arguments)


def soak(arguments: list[str]) -> bool:
    """the demo's loop for an hour with a capture in every third step, to find leaks: [--minutes 60]"""
    return run(DEV.ready(), "packages/core/tests/chaos/soak.py", *arguments)


def culprits(arguments: list[str]) -> bool:
    """hangs and slow steps of real processes with a known cause: is the cause named? [--hangs | --steps]
    [--runs 10] [WORDS OF A NAME]"""
    return run(DEV.ready(), "-m", "tests.culprits", *arguments)


def setup(arguments: list[str]) -> bool:
    """make or update `.venv` and stop there. --fresh: make it again from nothing. --engines: also the
    environments with the real engines of `test`"""
    if "--fresh" in arguments and DEV.folder.exists():
        DEV.unfinished.touch()
        DEV.stamp.unlink(missing_ok=True)
    say(f"ready: {DEV.ready()}")
    for environment in unasked().values() if "--engines" in arguments else ():
        say(f"ready: {environment.ready()}")
    return True


def release(arguments: list[str]) -> bool:
    """build the sdists and wheels, check them, try each extra in a fresh environment, and say what to upload:
    [--only EXTRAS ...] [--python PYTHON]"""
    return run(RELEASE.ready(), "tools/release.py", *arguments)


COMMANDS: dict[str, Callable[[list[str]], bool]] = {
    command.__name__: command
    for command in (demo, test, gpu, chaos, soak, culprits, check, bench, docs, setup, bump, release)
}


def main(arguments: list[str]) -> int:
    name, rest = (arguments or ["--help"])[0], arguments[1:]
    if name not in COMMANDS:
        asked = name in ("-h", "--help", "help")
        print(__doc__ if asked else f"dev.py has no command {name!r}.\n")
        for word, command in COMMANDS.items():
            print(f"  python3 dev.py {word:8} {' '.join((command.__doc__ or '').split())}")
        return 0 if asked else 2
    # On SIGTERM (the timeout of CI), exit in a way that ends the running commands too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return 0 if COMMANDS[name](rest) else 1
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
