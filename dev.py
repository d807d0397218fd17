"""The one tool for working on this repository. `python3 dev.py` lists its commands.

Needs Python >= 3.10 with pip and nothing else: every command makes the environment it needs (`.venv`), once,
and finds it ready in milliseconds afterwards. Standard library only. One file above 400 lines, because it has
to run from a bare checkout, before anything can be imported.
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

import fcntl
import hashlib
import importlib.util
import os
import queue
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent
PACKAGES = ("core", "rollout-vllm", "rollout-sglang", "npu")
EXTRAS = {"core": "[cli]"}
MANIFESTS = [ROOT / "packages" / name / "pyproject.toml" for name in PACKAGES]
VERSION = re.compile(r'(?m)^(version = "|.*"stepscope[a-z-]*==)([^"]+)(")')

FAILED: "list[str]" = []
"""The commands that failed, each with those of its tests that did (conftest.py writes them down)."""

# What pip prints when it fails, and what that means. The first that matches is shown.
ADVICE = (
    (r"No space left|Errno 28", "the disk is full (3 GB are needed, 8 GB with the CUDA build of torch)"),
    (r"No matching distribution found for torch", "there is no such torch for this Python: use 3.10 to 3.14"),
    (
        r"ConnectionError|ConnectTimeout|ReadTimeout|NewConnection|name resolution|SSLError|ProxyError",
        "the package index cannot be reached: check the network, and proxy and index in `pip config list`",
    ),
)


# Environments -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Environment:
    """A virtual environment: dependency groups of pyproject.toml and the four packages, editable."""

    folder: Path
    groups: tuple[str, ...]
    bare: str | None = None
    """A file of requirements that are installed without what they require in turn."""
    base: str = getattr(sys, "_base_executable", sys.executable)
    """The Python it is made with. Not that of a virtual environment, which may be the one to rebuild."""
    gigabytes: float = 3

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def stamp(self) -> Path:
        """Holds the fingerprint of what was installed; absent until an installation went through."""
        return self.folder / ".stepscope-ready"

    @property
    def unfinished(self) -> Path:
        """There during a set-up. Found at the start: one was killed and may have left half a package."""
        return self.folder.with_name(f"{self.folder.name}-unfinished")

    def ready(self) -> str:
        """Return its Python; make or update it if necessary. Exit with the fix if that fails."""
        if not self.is_current():
            with lock():
                if not self.is_current():  # another dev.py may have done it while this one waited
                    self.build()
        return self.python

    def is_current(self) -> bool:
        try:
            return os.path.exists(self.python) and self.stamp.read_text() == self.fingerprint()
        except OSError:
            return False

    def fingerprint(self) -> str:
        """Return a digest of requirements, this folder (editable installs) and the Python."""
        seen = hashlib.sha256(repr((str(ROOT), self.groups)).encode())
        seen.update((self.folder / "pyvenv.cfg").read_bytes())
        for file in (ROOT / "pyproject.toml", *MANIFESTS):
            # The tables of tools come last in these files and change nothing that is installed.
            seen.update(file.read_text().split("\n[tool.")[0].encode())
        if self.bare:
            seen.update((ROOT / self.bare).read_bytes())
        return seen.hexdigest()

    def build(self) -> None:
        usable = self.usable()
        check_disk(1 if usable else self.gigabytes)
        if usable:
            say(f"updating {self.folder.name}")
        else:
            say(f"setting up {self.folder.name}: some minutes and {self.gigabytes:g} GB, once")
            if sys.platform == "linux" and self.gigabytes > 2:
                say("(6 GB with the CUDA build of torch; CONTRIBUTING.md says how pip finds the CPU build)")
        if not usable:
            check_venv_module()
        self.unfinished.touch()
        self.stamp.unlink(missing_ok=True)
        if not usable:
            self.narrate("virtual environment", [self.base, "-m", "venv", "--clear", str(self.folder)])
        # 25.1 is the first pip with --group; 24.1 the first with raw progress
        self.pip("pip", "--upgrade", "pip>=25.1")
        self.fill()
        self.unfinished.unlink()
        self.stamp.write_text(self.fingerprint())

    def fill(self) -> None:
        editable = [
            word for name in PACKAGES for word in ("--editable", f"packages/{name}{EXTRAS.get(name, '')}")
        ]
        groups = [word for name in self.groups for word in ("--group", name)]
        self.pip("packages", "--progress-bar=raw", *groups, *editable)
        if self.bare:
            self.pip(self.bare, "--progress-bar=raw", "--no-deps", "--requirement", self.bare)

    def usable(self) -> bool:
        """Return whether the folder can be updated; otherwise it is made again."""
        if not self.folder.exists():
            return False
        if self.unfinished.exists():
            say(f"an earlier set-up of {self.folder.name} did not end: starting it afresh")
            return False
        probe = "import pip, sys; sys.exit(sys.version_info < (3, 10))"
        if succeeds([self.python, "-c", probe]):
            return True
        say(f"{self.folder.name} does not work (no pip in it, or its Python is gone): starting it afresh")
        return False

    def pip(self, what: str, *arguments: str) -> None:
        self.narrate(what, [self.python, "-m", "pip", "install", "--disable-pip-version-check", *arguments])

    def narrate(self, what: str, command: Sequence[str]) -> None:
        output = narrate(what, command)
        if output is None:
            return
        # A command that fails by itself cleans up, so what is there stays good to build upon.
        self.unfinished.unlink(missing_ok=True)
        advice = next(
            (f"It looks as if {words}. " for pattern, words in ADVICE if re.search(pattern, output)), ""
        )
        again = " ".join(["python3", *sys.argv])
        sys.exit(
            f"{output}\n\nSetting up {self.folder.name} failed at: {what}. {advice}Then run `{again}` again."
        )


@dataclass(frozen=True)
class EngineEnvironment(Environment):
    """A real engine over another environment, whose packages it sees (torch, Ray, our own) and shadows.

    Its recipe is a folder `packages/<package>/tests/engines/<name>` that holds any of

    * `over.txt`: the recipe it builds upon, of any package; without it, the environment of development
    * `requirements.txt`, and `bare.txt`, which is installed without what it requires in turn
    * `group.txt`: the dependency group that it is made of, with our packages and with no environment below it
    * `finish.py`, run in the environment at the end; without it, that of the recipe it builds upon
    * `on_request.txt`: why `dev.py test` leaves its tests to `dev.py test --engines`
    """

    recipe: Path = ROOT
    under: Environment | None = field(kw_only=True)
    """The environment below it; None if it stands by itself."""

    @property
    def tests(self) -> "list[Path]":
        """The tests that run in it, and nowhere else: they import the engine. Files of its name, or all."""
        real = self.recipe.parent.parent / "real"
        name = f"test_{self.recipe.name.partition('-')[0]}"
        own = real / f"{name}.py"
        return [own, *sorted(real.glob(f"{name}_*.py"))] if own.exists() else [real]

    def fingerprint(self) -> str:
        below = self.under.fingerprint() if self.under else super().fingerprint()
        seen = hashlib.sha256(below.encode())
        for file in sorted(self.recipe.parent.rglob("*")):  # all recipes of a package: they share files
            if file.is_file():
                seen.update(file.read_bytes())
        return seen.hexdigest()

    def ready(self) -> str:
        if self.under:
            self.under.ready()  # first: the lock of a set-up is held once
        return super().ready()

    def fill(self) -> None:
        if self.under:
            self.fill_over(self.under)
        else:
            super().fill()

    def fill_over(self, under: Environment) -> None:
        where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        ours, theirs = (
            subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
            for python in (self.python, under.python)
        )
        # addsitedir, not a bare path: the editable packages over there are .pth files in their turn
        Path(ours, "stepscope_under.pth").write_text(f"import site; site.addsitedir({theirs!r})\n")
        for name, options in (("requirements.txt", ()), ("bare.txt", ("--no-deps",))):
            file = self.recipe / name
            if file.exists():
                self.pip(name, "--progress-bar=raw", *options, "--requirement", str(file))
        recipes = [self.recipe, *([under.recipe] if isinstance(under, EngineEnvironment) else [])]
        last = next((recipe / "finish.py" for recipe in recipes if (recipe / "finish.py").exists()), None)
        if last is not None:
            self.narrate("finish.py", [self.python, str(last)])


DEV = Environment(ROOT / ".venv", ("dev",))
BENCH = Environment(ROOT / ".venv-bench", ("bench",), bare="benchmarks/peers.txt", gigabytes=4)
RELEASE = Environment(ROOT / ".venv-release", ("release",), gigabytes=0.5)


def engines() -> "dict[str, EngineEnvironment]":
    """Return the environments with real engines, by name."""
    recipes = (path for path in ROOT.glob("packages/*/tests/engines/*") if path.is_dir())
    return {recipe.name: engine(recipe) for recipe in sorted(recipes, key=lambda path: path.name)}


def recipe_of(name: str) -> Path:
    """Return the folder of the recipe of that name, in whatever package it is."""
    return next(ROOT.glob(f"packages/*/tests/engines/{name}"))


def newest(name: str) -> Environment:
    """Return the environment with the newest engine of that name; that of development where there is none."""
    versions = {
        version_of(key): environment
        for key, environment in engines().items()
        if key.partition("-")[0] == name
    }
    return versions[max(versions)] if versions else DEV


def version_of(recipe: str) -> "tuple[int, ...]":
    """Return the version of an environment: `sglang-0.5.23` -> (0, 5, 23)."""
    return tuple(int(part) for part in re.findall(r"\d+", recipe))


def engine(recipe: Path) -> EngineEnvironment:
    over, group = recipe / "over.txt", recipe / "group.txt"
    folder = ROOT / f".venv-{recipe.name}"
    if group.exists():
        groups = (group.read_text().strip(),)
        return EngineEnvironment(folder, groups, recipe=recipe, under=None, gigabytes=0.4)
    under = engine(recipe_of(over.read_text().strip())) if over.exists() else DEV
    return EngineEnvironment(folder, (), recipe=recipe, under=under, gigabytes=2)


def check_disk(gigabytes: float) -> None:
    for folder, need in ((ROOT, gigabytes), (Path(tempfile.gettempdir()), 1)):
        free = shutil.disk_usage(folder).free / 1e9
        if free < need:
            sys.exit(
                f"{free:.1f} GB are free at {folder}; setting up needs {need:g} GB there. Fix: free "
                "some, or use a larger disk (clone there; the variable TMPDIR moves temporary files)"
            )


def check_venv_module() -> None:
    absent = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if absent:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        sys.exit(
            f"{sys.executable} has no module {' and '.join(absent)} and cannot make a virtual environment. "
            f"Fix: `sudo apt install {package}` on Debian and Ubuntu; elsewhere a complete Python, "
            "from python.org, pyenv or conda"
        )


@contextmanager
def lock() -> Iterator[None]:
    """Allow one set-up at a time in this checkout, by a lock on this file."""
    with open(__file__, "rb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another dev.py is setting up here: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


# Running things ---------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(f"dev.py: {text}", flush=True)


def succeeds(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:  # no such program
        return False


def run(*command: str) -> bool:
    """Run a command on this terminal and return whether it succeeded. The command handles Ctrl-C."""
    shown = "$ " + " ".join(word.replace(f"{ROOT}/", "") for word in command)
    print(shown, flush=True)
    with tempfile.NamedTemporaryFile("r") as tests:
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "DEV_FAILED_TESTS": tests.name})
        interrupts: list[int] = []
        before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
        try:
            code = process.wait()
        finally:
            signal.signal(signal.SIGINT, before)
            stop(process, process.send_signal)
        if interrupts:
            raise KeyboardInterrupt
        if code:
            FAILED.extend((shown, *(f"    {test}" for test in tests.read().splitlines())))
    return code == 0


def stop(process: "subprocess.Popen[str] | subprocess.Popen[bytes]", send: Callable[[int], None]) -> None:
    """End `process` if it still runs. `send` signals it, or it and all that it started."""
    if process.poll() is None:
        send(signal.SIGINT)  # not SIGTERM: pip and pytest tidy up behind themselves when interrupted
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            send(signal.SIGKILL)
            process.wait()


def narrate(what: str, command: Sequence[str]) -> "str | None":
    """Run `command`, and show its duration and its last output on one line.

    Returns the end of its output if it failed, None if it succeeded.
    """
    tail: deque[str] = deque(maxlen=25)
    line = Line(what)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a group of its own, to stop what it starts as well (venv runs ensurepip)
    ) as process:
        try:
            for text in ticks(process):
                if text and not text.startswith("Progress "):
                    tail.append(text)
                line.show(text)
            code = process.wait()
        finally:  # after Ctrl-C or SIGTERM no installation continues behind the prompt
            stop(process, lambda number: os.killpg(process.pid, number))
            line.end()
    return "\n".join((*tail, f"({' '.join(command)} exited with {code})")) if code else None


def ticks(process: "subprocess.Popen[str]") -> Iterator[str]:
    """Yield the lines that `process` prints, and "" after each second without one."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for text in process.stdout or ():
            lines.put(text.strip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            text = lines.get(timeout=1)
        except queue.Empty:
            text = ""
        if text is None:
            return
        yield text


class Line:
    """One line of progress: rewritten in place on a terminal, else a new line at most every ten seconds."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.started = self.shown = time.monotonic()
        self.doing = ""
        self.terminal = sys.stdout.isatty()

    def show(self, text: str) -> None:
        portion = ""
        if text.startswith("Progress "):  # pip's raw progress: "Progress <bytes> of <bytes>"
            done, _, size = text[9:].partition(" of ")
            portion = f" {100 * int(done) // max(int(size), 1)} %"
        elif text:
            self.doing = text
        now = time.monotonic()
        if self.terminal or now - self.shown >= 10:
            self.shown = now
            self.put(f"  {now - self.started:4.0f} s  {self.what}: {self.doing}{portion}")

    def end(self) -> None:
        self.put(f"  {time.monotonic() - self.started:4.0f} s  {self.what}")
        if self.terminal:
            print(flush=True)

    def put(self, text: str) -> None:
        if self.terminal:
            columns = shutil.get_terminal_size().columns
            print(f"\r\x1b[K{text[: columns - 1]}", end="", flush=True)
        else:
            print(text[:160], flush=True)


# Commands ---------------------------------------------------------------------------------------------------


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
    --two-engines (vLLM and SGLang in one run), --two-hosts (needs root), --no-engines, --pythons (the core,
    on every Python here)"""
    first, rest = (arguments or [""])[0], arguments[1:]
    if first == "--pythons":
        passed_on = [test_on(base, rest) for base in other_pythons()]
        return all(passed_on)
    if first == "--engines":
        return test_engines(rest if set(rest) & set(engines()) else [*engines(), *rest])
    if first == "--two-engines":
        built = [newest(name).ready() for name in ("vllm", "sglang")]
        return all(built) and run(DEV.ready(), "-m", "pytest", "tests/two_engines.py", *rest)
    if first == "--two-hosts":
        newest("vllm").ready()
        return run(DEV.ready(), "-m", "pytest", "tests/two_hosts.py", *rest)
    python = DEV.ready()
    if arguments and first != "--no-engines":
        return run(python, "-m", "pytest", *arguments)
    real = first != "--no-engines"
    with engines_beside() if real else nullcontext() as engines_passed:
        # What follows runs even when something failed before it: one run is to show all that is wrong.
        passed = {"the check": check([]), "the tests": run(python, "-m", "pytest", *rest)}
        if engines_passed is not None:
            passed["the tests on real engines"] = engines_passed()
    if real:
        for name, reason in left_to_request().items():
            say(f"NOT RUN: the tests on {name}: {reason} Fix: `python3 dev.py test --engines`")
        say("NOT RUN: vLLM and SGLang in one run, minutes long. Fix: `python3 dev.py test --two-engines`")
    say("NOT RUN: two hosts that share no folder, which takes root. Fix: `python3 dev.py test --two-hosts`")
    for what in (what for what, good in passed.items() if not good):
        say(f"FAILED: {what}")
    for line in FAILED:  # of a long log, often only the end is kept
        print(line)
    return all(passed.values())


@contextmanager
def engines_beside() -> "Iterator[Callable[[], bool]]":
    """Test the real engines in another dev.py meanwhile, at a low priority: most tests wait for something.

    Yields a function that waits for its end, shows its output and returns whether the tests passed.
    """
    say("the tests on real engines run meanwhile; their output follows that of the others")
    with tempfile.TemporaryFile() as output, tempfile.NamedTemporaryFile("r") as failed:
        process = subprocess.Popen(
            [sys.executable, __file__, "test", "--engines", *unasked()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "DEV_FAILED_TESTS": failed.name},
            start_new_session=True,
            preexec_fn=partial(os.nice, 10),
        )

        def passed() -> bool:
            for chunk in written(process, output):
                print(chunk, end="", flush=True)
            FAILED.extend(failed.read().splitlines())
            return process.returncode == 0

        try:
            yield passed
        finally:
            stop(process, partial(os.killpg, process.pid))


def written(process: "subprocess.Popen[bytes]", output: "IO[bytes]") -> Iterator[str]:
    """Yield what `process` has written to its file `output`, then what it still writes until it ends."""
    at, ended = 0, False
    while not ended:
        try:
            process.wait(1)
            ended = True
        except subprocess.TimeoutExpired:
            pass
        chunk = os.pread(output.fileno(), 1 << 26, at)
        at += len(chunk)
        yield chunk.decode(errors="replace")


def test_engines(arguments: Sequence[str]) -> bool:
    """Run the tests of real engines, each in the environment that holds its engine.

    Arguments are names of environments (none: all that need no request), then what pytest gets.
    """
    known = engines()
    names = [name for name in arguments if name in known] or list(unasked())
    options = [word for word in arguments if word not in known]
    failed = [name for name in names if not test_engine(known[name], options)]
    if failed:
        say(f"failed or not set up: {', '.join(failed)} (`dev.py test --no-engines` leaves these out)")
    if "DEV_FAILED_TESTS" in os.environ:  # of the dev.py that runs these beside other tests
        Path(os.environ["DEV_FAILED_TESTS"]).write_text("".join(f"{line}\n" for line in FAILED))
    return not failed


def unasked() -> "dict[str, EngineEnvironment]":
    """Return the environments whose tests `dev.py test` runs without a request."""
    requested = left_to_request()
    return {name: environment for name, environment in engines().items() if name not in requested}


def left_to_request() -> "dict[str, str]":
    """Return the environments whose tests `dev.py test` leaves out, with the reasons."""
    notes = {name: environment.recipe / "on_request.txt" for name, environment in engines().items()}
    return {name: note.read_text().strip() for name, note in notes.items() if note.exists()}


def test_engine(environment: EngineEnvironment, options: Sequence[str]) -> bool:
    try:
        python = environment.ready()
    except SystemExit as reason:  # no network, or no such engine for this machine: the others still run
        say(f"NOT RUN: the tests on {environment.recipe.name}. {reason}")
        return False
    return run(python, "-m", "pytest", *map(str, environment.tests), *options)


def test_on(base: str, arguments: Sequence[str]) -> bool:
    folder = ROOT / f".venv-{python_version(base)}"
    environment = Environment(folder, ("test",), base=base, gigabytes=0.3)
    return run(environment.ready(), "-m", "pytest", *arguments)


def other_pythons() -> list[str]:
    """Return one interpreter of each version from 3.10 on, of those on PATH and in pyenv."""
    pyenv = sorted(map(str, (Path.home() / ".pyenv" / "versions").glob("3.*/bin/python")))
    named = [shutil.which(f"python3.{minor}") for minor in range(10, 20)]
    by_version = {python_version(path): path for path in (*pyenv, *named) if path}
    return [by_version[f"3.{minor}"] for minor in range(10, 20) if f"3.{minor}" in by_version]


def python_version(base: str) -> str:
    """`3.<minor>`; "" for what does not run, such as pyenv's stand-ins for versions that are not chosen."""
    show = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([base, "-c", show], capture_output=True, text=True).stdout.strip()


def check(arguments: list[str]) -> bool:
    """ruff and mypy over everything. --fix: ruff fixes what it can"""
    python = DEV.ready()
    fix = "--fix" in arguments
    passed = [
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
    everything = [*sources, *(path for path in others if (ROOT / path).exists())]
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


def chaos(arguments: list[str]) -> bool:
    """a small trainer on Ray to which something happens in every other step: [--rounds 100] [--seed N]"""
    return run(DEV.ready(), "packages/core/tests/chaos/run.py", *arguments)


def soak(arguments: list[str]) -> bool:
    """the demo's loop for an hour, a capture each third step: does anything grow? [--minutes 60]"""
    return run(DEV.ready(), "packages/core/tests/chaos/soak.py", *arguments)


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


def bump(arguments: list[str]) -> bool:
    """the one version to X.Y.Z: in all packages, their pins on each other and the changelog"""
    if len(arguments) != 1 or not re.fullmatch(r"\d+\.\d+\.\d+", arguments[0]):
        sys.exit(f"bump takes one version such as 0.2.0, not {' '.join(arguments) or 'nothing'}")
    new = arguments[0]
    changelog = ROOT / "CHANGELOG.md"
    texts = {file: file.read_text() for file in (*MANIFESTS, changelog)}
    old = one_version({file: texts[file] for file in MANIFESTS})
    heading = "## [Unreleased]\n"
    if new == old or heading not in texts[changelog]:
        sys.exit(f"the version is {old}; for {new}, CHANGELOG.md needs the heading {heading.strip()!r}")
    for file in MANIFESTS:
        texts[file] = VERSION.sub(rf"\g<1>{new}\g<3>", texts[file])
    released = f"{heading}\n## [{new}] - {time.strftime('%Y-%m-%d')}\n"
    texts[changelog] = texts[changelog].replace(heading, released, 1)
    for file, text in texts.items():
        file.write_text(text)
    say(f"{old} -> {new} in {len(texts)} files. Read `git diff`, run `dev.py test`, commit, tag v{new}")
    return True


def release(arguments: list[str]) -> bool:
    """build the sdists and wheels, check them, try each extra in a fresh environment, and say what to upload:
    [--only EXTRAS ...] [--python PYTHON]"""
    return run(RELEASE.ready(), "tools/release.py", *arguments)


def one_version(texts: "dict[Path, str]") -> str:
    """Return the version that all of `texts` state, for themselves and in pins. Exit if they differ."""
    stated = {file: {match[2] for match in VERSION.finditer(text)} for file, text in texts.items()}
    versions = set().union(*stated.values())
    if len(versions) != 1:
        rows = "\n".join(f"  {file.relative_to(ROOT)}: {', '.join(sorted(v))}" for file, v in stated.items())
        sys.exit(f"the versions do not agree, so there is none to bump from:\n{rows}")
    return versions.pop()


COMMANDS: dict[str, Callable[[list[str]], bool]] = {
    command.__name__: command
    for command in (demo, test, chaos, soak, check, bench, docs, setup, bump, release)
}


def main(arguments: list[str]) -> int:
    name, rest = (arguments or ["--help"])[0], arguments[1:]
    if name not in COMMANDS:
        asked = name in ("-h", "--help", "help")
        print(__doc__ if asked else f"dev.py has no command {name!r}.\n")
        for word, command in COMMANDS.items():
            print(f"  python3 dev.py {word:7} {' '.join((command.__doc__ or '').split())}")
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
