"""The one tool for working on this repository. `python3 dev.py` lists its commands.

Needs Python >= 3.10 with pip and nothing else: every command makes the environment it needs (`.venv`), once,
and finds it ready in milliseconds afterwards. The modules of `tools` that it imports need no more either.
"""

import sys

# Above every other import, and the whole file in words that Python 3.6 can parse: an old Python prints this.
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
    """a real, tiny RL run on this machine, profiled, with its report; --engine vllm or sglang or
    vllm,sglang: with those"""
    python = DEV.ready()
    place = arguments.index("--engine") + 1 if "--engine" in arguments else len(arguments)
    names = [name for word in arguments[place : place + 1] for name in word.split(",")]
    if len(names) == 1:
        python = newest(names[0]).ready()
    elif names:  # each in its own environment, and the rest of the run in that of development
        arguments[place] = ",".join(f"{name}={newest(name).ready()}" for name in names)
    return run(python, "-m", "stepscope", "demo", *arguments)


def test(arguments: list[str]) -> bool:
    """check, then every test; with arguments pytest alone, with those. Or first one of --engines [NAME ...],
    --newest [torch vllm ...] (the newest releases on the index), --two-engines (vLLM and SGLang in one run),
    --two-hosts (needs root), --no-engines, --pythons (the core, on every Python here)"""
    first, rest = (arguments or [""])[0], arguments[1:]
    if first == "--pythons":
        passed_on = [test_on(base, rest) for base in other_pythons()]
        return all(passed_on)
    if first == "--engines":
        if set(rest) & set(engines()):
            return test_engines(rest)
        DEV.ready()  # its torch decides what is possible
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
    """Run the check and all tests, on real engines if `real`; name what failed and what did not run."""
    python = DEV.ready()
    # Once for all: where PYTHONDONTWRITEBYTECODE is set, each of thousands of processes would do it again.
    sources = [str(ROOT / "packages" / name / "src") for name in PACKAGES]
    succeeds([python, "-m", "compileall", "-q", *sources])
    with engines_beside() if real else nullcontext() as engines_passed:
        # What follows runs even when something failed before it: one run is to show all that is wrong.
        passed = {"the check": check([]), "the tests": test_in_two(python, options)}
        if engines_passed is not None:
            passed["the tests on real engines"] = engines_passed()
    for line in left_out(real):
        say(line)
    for what in (what for what, good in passed.items() if not good):
        say(f"FAILED: {what}")
    for line in processes.FAILED:  # of a long log, often only the end is kept
        print(line)
    return all(passed.values())


def test_in_two(python: str, options: list[str]) -> bool:
    """Run the tests in two processes that share the files, in order. Run those that fail again, alone.

    Where a process died, pytest-xdist would run the test that killed it nine times more, and not all others.
    """
    in_two = ("-n2", "--max-worker-restart=0", "--dist=loadfile", "--no-loadscope-reorder")
    return run_tests(python, *PYTEST, *in_two, *options, again=(python, *PYTEST, *options))


def left_out(real: bool) -> list[str]:
    """Return a line for the tests that did not run: impossible here, or only on request."""
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
    """ruff and mypy over everything. --fix: ruff fixes what it can, and docs/reference is written anew"""
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
    """Return the paths that mypy reads, a list for each of its runs.

    `packages/rollout-vllm` is no module name, so test files of one name in two such packages are one module
    to mypy: the tests of each package are a run of their own.
    """
    others = ("tests", "tools", "benchmarks", "docs", "examples", "conftest.py", "dev.py")
    sources = [f"packages/{name}/src" for name in PACKAGES]
    tests = [f"packages/{name}/tests" for name in PACKAGES]
    everything = [*sources, "packages/conftest.py", *(path for path in others if (ROOT / path).exists())]
    return [everything, *([path] for path in tests if (ROOT / path).exists())]


def bench(arguments: list[str]) -> bool:
    """every benchmark against its peers, or the one named (further arguments go to it)"""
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))
    chosen = arguments[:1] or names
    if not set(chosen) <= set(names):
        sys.exit(f"no benchmark is named {chosen[0]}; there are: {', '.join(names) or 'none'}")
    python = BENCH.ready()
    passed = [run(python, f"benchmarks/{name}.py", *arguments[1:]) for name in chosen]
    return all(passed)


def docs(arguments: list[str]) -> bool:
    """the site of docs/, into build/site; a warning of mkdocs is an error. --serve: shown while you edit"""
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
    """a small trainer on Ray to which something happens in every other step: [--rounds 100] [--seed N]
    [--recorder: while the flight recorder writes]"""
    return run(DEV.ready(), "packages/core/tests/chaos/run.py", *arguments)


def soak(arguments: list[str]) -> bool:
    """the demo's loop for an hour, a capture each third step: does anything grow? [--minutes 60]"""
    return run(DEV.ready(), "packages/core/tests/chaos/soak.py", *arguments)


def culprits(arguments: list[str]) -> bool:
    """hangs and slow steps of real processes, each with a culprit that was planted: is it named? [--hangs |
    --steps] [--runs 10] [WORDS OF A NAME]"""
    return run(DEV.ready(), "-m", "tests.culprits", *arguments)


def setup(arguments: list[str]) -> bool:
    """make or update the environment and stop there. --fresh: from nothing. --engines: those with the real
    engines of `test` as well"""
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
    # Without this a SIGTERM (CI's timeout) would leave what runs here working on behind us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return 0 if COMMANDS[name](rest) else 1
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
