"""Record facts about the functions that presets name, from the sources of the frameworks.

    python -m tools.framework_facts                        # all presets: clones each framework's main branch
    python -m tools.framework_facts skyrl                  # one preset
    python -m tools.framework_facts skyrl path/to/SkyRL    # from a folder: a work tree, or a bare repository

The command writes `packages/core/tests/data/frameworks/<preset>.json`. For each function, the file has the
arguments, the kind, the decorators, the Ray actor classes with this function, and the classes that override
it. It has the version and the commit of the source, and no code. The sources are parsed, not imported. For
frameworks in `RELEASED`, the source is the newest wheel.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from stepscope.config.presets import Preset, place_of, preset_names, read_preset
from tools.repository import ROOT

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Shape: TypeAlias = Literal["plain", "async", "both", "same", "unknown"]

DATA = ROOT / "packages" / "core" / "tests" / "data" / "frameworks"
REPOSITORIES = {
    "nemo-rl": "https://github.com/NVIDIA-NeMo/RL",
    "skyrl": "https://github.com/NovaSky-AI/SkyRL",
    "slime": "https://github.com/THUDM/slime",
    "verl": "https://github.com/verl-project/verl",
}
RELEASED = {
    "areal": ("areal",),
    "openrlhf": ("openrlhf",),
    "rllib": ("ray",),
    "trl": ("trl", "transformers", "accelerate"),
}
"""{preset: distributions with the functions}."""
VERSIONS = {
    "nemo-rl": ("nemo_rl/package_info.py", r"^MAJOR = (\d+)\nMINOR = (\d+)\nPATCH = (\d+)"),
    "skyrl": ("skyrl-gym/pyproject.toml", r'^version = "([^"]+)"'),
    "slime": ("setup.py", r'version="([^"]+)"'),
    "verl": ("verl/version/version", r"(\S+)"),
}
"""{preset: (file of the repository with the version, pattern of the version in this file)}."""
_FRAMES = re.compile(r"\b(currentframe|_getframe|getouterframes)\b|\binspect\.stack\b")
_NO_PACKAGE = re.compile(
    r"(^|/)(tests?|examples?|docs|scripts|recipe|research|3rdparty|skyrl-agent)/|/mock\.py$"
)
"""Paths of a source to leave out, because no user of the framework imports them."""
_LEVELS = 3
"""Levels of calls to follow from a decorator, to find a function that reads the frame of its caller."""


class DecoratorFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """A decorator, and the kind of function that it returns."""

    name: str
    shape: Shape
    """`plain`: not a coroutine function; `async`: a coroutine function; `both`: the same kind as the
    decorated function; `same`: the decorated function itself; `unknown`: not found in the source."""
    looks_at_caller: bool = False


class FunctionFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The facts about a function that an entry of a preset depends on."""

    arguments: tuple[str, ...]
    is_async: bool = False
    is_generator: bool = False
    looks_at_caller: bool = False
    static: Literal["", "staticmethod", "classmethod"] = ""
    decorators: tuple[DecoratorFacts, ...] = ()
    """From the outermost to the innermost."""
    defined_in: str = ""
    """The place of the definition, `module:Class`, if the named class inherits the method or the named module
    imports the function."""
    actors: dict[str, str] = {}
    """{Ray actor class `module:Class` that has this method: how it becomes an actor class}. The values are
    `decorator` (`@ray.remote`), `module` (`ray.remote(Class)` at import) or `call` (`ray.remote` later)."""
    overridden_in: tuple[str, ...] = ()
    """Subclasses whose own method of this name does not call this method."""


class FrameworkFacts(msgspec.Struct, frozen=True):
    """The functions of a preset in one version of its framework."""

    source: str
    """The repository, or the distributions with their versions."""
    version: str
    commit: str
    """The commit of the source, or "" for a release."""
    functions: dict[str, FunctionFacts]
    """{`module:name`: facts}, without functions that the source does not have."""
    settings: tuple[str, ...]
    """The preset's settings that occur in the source."""


class Source:
    """The source of a framework: a folder with its packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._trees: dict[Path, ast.Module] = {}
        self._found: dict[tuple[str, str], tuple[str, ast.stmt] | None] = {}
        self._below: dict[tuple[str, str], list[tuple[str, ast.ClassDef]]] = {}

    def tree(self, path: Path) -> ast.Module:
        """Return the syntax tree of a file."""
        if path not in self._trees:
            gc.disable()  # Python before 3.11.8 may crash if the collector runs during `ast.parse`
            try:
                self._trees[path] = ast.parse(path.read_bytes())
            finally:
                gc.enable()
        return self._trees[path]

    @cached_property
    def texts(self) -> dict[Path, str]:
        """{Python file: its text}."""
        files = (path for path in self.folder.rglob("*.py") if not _NO_PACKAGE.search(self._relative(path)))
        return {path: path.read_text(errors="replace") for path in sorted(files)}

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def file(self, module: str) -> Path | None:
        """Return the file of a module, or None."""
        roots = (self.folder, self.folder / "skyrl-gym")  # SkyRL has a package in a folder of its own
        places = [root.joinpath(*module.split(".")) for root in roots]
        files = (path for place in places for path in (place.with_suffix(".py"), place / "__init__.py"))
        return next((path for path in files if path.exists()), None)

    def module(self, path: Path) -> str:
        """Return the module name of a file."""
        relative = path.relative_to(self.folder).with_suffix("")
        parts = [part for part in relative.parts if part not in ("__init__", "skyrl-gym")]
        return ".".join(parts)

    # Definitions

    def definition(self, module: str, name: str) -> Function | None:
        """Return the definition of the function or method `name` of `module`, also if it is inherited."""
        found = self.function(module, name)
        return None if found is None else found[2]

    def function(self, module: str, name: str) -> tuple[str, str, Function] | None:
        """Return (module, class or "", definition) of the function or method `name` of `module`, or None."""
        *classes, function = name.split(".")
        target = self.find(module, classes[0] if classes else function)
        if target is None:
            return None
        where, node = target
        if not classes:
            return (where, "", node) if isinstance(node, Function) else None
        return self.method(where, node, function) if isinstance(node, ast.ClassDef) else None

    def method(self, module: str, node: ast.ClassDef, name: str) -> tuple[str, str, Function] | None:
        """Return (module, class, definition) of a method of a class or of its base classes, or None."""
        for member in node.body:
            if isinstance(member, Function) and member.name == name:
                return module, node.name, member
        for where, base in self.bases(module, node):
            inherited = self.method(where, base, name)
            if inherited is not None:
                return inherited
        return None

    def bases(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        """Yield (module, definition) of each base class that is in this source."""
        for base in node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            target = self.find(module, plain.id) if isinstance(plain, ast.Name) else None
            if target is not None and isinstance(target[1], ast.ClassDef):
                yield target[0], target[1]

    def find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """Return (module, definition) of `name` in `module`, found through imports, or None."""
        if (module, name) not in self._found:
            self._found[module, name] = self._find(module, name)
        return self._found[module, name]

    def _find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        path = self.file(module)
        if path is None:
            return None
        tree = self.tree(path)
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        for nodes in (tree.body, ast.walk(tree)):
            for node in nodes:
                if isinstance(node, kinds) and node.name == name:
                    return module, node
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return self.find(_target(path, module, node), alias.name)
        return None

    # Classes

    def below(self, module: str, cls: str) -> list[tuple[str, ast.ClassDef]]:
        """Return (module, definition) of each direct or indirect subclass."""
        if (module, cls) not in self._below:
            direct = list(self._directly_below(module, cls))
            further = [each for where, node in direct for each in self.below(where, node.name)]
            self._below[module, cls] = direct + further
        return self._below[module, cls]

    def _directly_below(self, module: str, cls: str) -> Iterator[tuple[str, ast.ClassDef]]:
        for path, text in self.texts.items():
            for known in dict.fromkeys([cls, *re.findall(rf"\b{cls} as (\w+)", text)]) if cls in text else ():
                derived = rf"^\s*class\s+(\w+)\s*\([^)]*\b{known}\b"
                for name in dict.fromkeys(re.findall(derived, text, re.MULTILINE)):
                    where = self.module(path)
                    target = self.find(where, name)
                    if target is None or target[0] != where or not isinstance(target[1], ast.ClassDef):
                        continue
                    if any((base, node.name) == (module, cls) for base, node in self.bases(where, target[1])):
                        yield where, target[1]

    def sent_by(self, module: str, node: ast.ClassDef) -> str | None:
        """Return how a class becomes a Ray actor class (see `FunctionFacts.actors`), or None."""
        if any(_dotted(decorator) == "ray.remote" for decorator in node.decorator_list):
            return "decorator"
        call = re.compile(rf"\bray\.remote(?:\([^()]*\))?\(\s*{node.name}\s*\)")
        files = [path for path, text in self.texts.items() if call.search(text)]
        of_class = [path for path in files if self.find(self.module(path), node.name) == (module, node)]
        own = self.file(module)
        if own in of_class and any(call.search(ast.unparse(line)) for line in self._at_import(own)):
            return "module"
        return "call" if of_class else None

    def _at_import(self, path: Path) -> Iterator[ast.stmt]:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        return (node for node in self.tree(path).body if not isinstance(node, kinds))

    # Functions

    def facts(self, module: str, name: str) -> FunctionFacts | None:
        """Return the facts about a function, or None if the source does not have it."""
        found = self.function(module, name)
        if found is None:
            return None
        where, cls, node = found
        static = [_dotted(decorator) for decorator in node.decorator_list]
        decorators = [
            self._decorator(where, decorator)
            for decorator in node.decorator_list
            if _dotted(decorator) not in ("staticmethod", "classmethod")
        ]
        actors, overridden = self._classes(module, name, node) if "." in name else ({}, ())
        named = self.find(module, name.split(".")[0])
        is_own = named is not None and (named[0], name.split(".")[0]) == (where, cls or name)
        return FunctionFacts(
            arguments=arguments(node),
            is_async=isinstance(node, ast.AsyncFunctionDef),
            is_generator=any(isinstance(part, ast.Yield | ast.YieldFrom) for part in _own(node)),
            looks_at_caller=_looks(node),
            static=next((kind for kind in ("staticmethod", "classmethod") if kind in static), ""),
            decorators=tuple(decorators),
            defined_in="" if is_own else f"{where}:{cls}".rstrip(":"),
            actors=actors,
            overridden_in=overridden,
        )

    def _classes(self, module: str, name: str, node: Function) -> tuple[dict[str, str], tuple[str, ...]]:
        cls, method = name.rsplit(".", 1)
        target = self.find(module, cls)
        if target is None or not isinstance(target[1], ast.ClassDef):
            return {}, ()
        actors: dict[str, str] = {}
        overridden: list[str] = []
        for where, below in [(target[0], target[1]), *self.below(target[0], cls)]:
            found = self.method(where, below, method)
            label = f"{where}:{below.name}"
            sent = self.sent_by(where, below)
            if found is not None and found[2] is node:
                actors.update({label: sent} if sent else {})
            elif found is not None and found[:2] == (where, below.name) and not _calls_base(found[2]):
                overridden.append(label)
        return dict(sorted(actors.items())), tuple(sorted(set(overridden)))

    def _decorator(self, module: str, node: ast.expr) -> DecoratorFacts:
        name = _dotted(node)
        target = self._decorating(module, name)
        if target is None:
            return DecoratorFacts(name, _ELSEWHERE.get(name, "unknown"))
        where, function = target
        return DecoratorFacts(name, _shape(function), self._frames(where, function, _LEVELS))

    def _decorating(self, module: str, name: str) -> tuple[str, Function] | None:
        """Return (module, definition) of a decorator that is a function or a method, or None."""
        first, _, rest = name.partition(".")
        if not rest:
            found = self.function(module, first)
            return None if found is None else (found[0], found[2])
        in_class = self.function(module, name) if rest.count(".") == 0 else None
        if in_class is not None:
            return in_class[0], in_class[2]
        path = self.file(module)
        for node in ast.walk(self.tree(path)) if path is not None else ():
            for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                if (alias.asname or alias.name) == first and path is not None:
                    above = f"{_target(path, module, node)}." if isinstance(node, ast.ImportFrom) else ""
                    return self._named(above + alias.name, rest)
        return None

    def _named(self, module: str, name: str) -> tuple[str, Function] | None:
        """Return (module, definition) of a function, or of a method that `name = OBJECT.name` binds."""
        found = self.function(module, name)
        if found is not None:
            return found[0], found[2]
        path = self.file(module)
        bound = path is not None and re.search(rf"^{name} = \w+\.{name}$", self.texts[path], re.MULTILINE)
        for node in self.tree(path).body if path is not None and bound else ():
            for member in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(member, Function) and member.name == name:
                    return module, member
        return None

    def _frames(self, module: str, function: Function, levels: int) -> bool:
        if _looks(function):
            return True
        calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
        called = {name.id for name in calls if isinstance(name, ast.Name)}
        found = (self.function(module, name) for name in sorted(called)) if levels else ()
        return any(self._frames(each[0], each[2], levels - 1) for each in found if each is not None)


_ELSEWHERE: dict[str, Shape] = {"torch.no_grad": "plain", "torch.inference_mode": "plain"}
"""Shapes of decorators from other packages."""


def arguments(function: Function) -> tuple[str, ...]:
    """Return the names of a function's parameters, in order."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *filter(None, [given.vararg]), *given.kwonlyargs]
    return tuple(argument.arg for argument in [*every, *filter(None, [given.kwarg])])


def _target(path: Path, module: str, node: ast.ImportFrom) -> str:
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    above = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*above, *((node.module or "").split("."))]).strip(".")


def _dotted(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def _own(function: Function) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without the bodies of inner functions and classes."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(node))


def _looks(function: Function) -> bool:
    """Return whether a function, or a function inside it, reads the frame of its caller."""
    return any(_FRAMES.search(ast.unparse(statement)) for statement in function.body)


def _calls_base(function: Function) -> bool:
    """Return whether a method calls the method that it overrides, by `super()`."""
    return re.search(rf"super\([^)]*\)\.{function.name}\b", ast.unparse(function)) is not None


def _shape(decorator: Function) -> Shape:
    inner = [node for node in ast.walk(decorator) if isinstance(node, Function) and node is not decorator]
    wrappers = {type(node) for node in inner if node.args.vararg is not None or node.args.kwarg is not None}
    if wrappers == {ast.FunctionDef, ast.AsyncFunctionDef}:
        return "both"
    if wrappers == {ast.AsyncFunctionDef}:
        return "async"
    return "plain" if wrappers else "same"


def facts_of(preset: Preset, source: Source) -> dict[str, FunctionFacts]:
    """Return the facts about a preset's functions that are in `source`."""
    places = dict.fromkeys((str(entry.module), str(entry.name)) for entry in preset.entries)
    found = {f"{module}:{name}": source.facts(module, name) for module, name in sorted(places)}
    return {name: facts for name, facts in found.items() if facts is not None}


def settings_in(preset: Preset, source: Source) -> set[str]:
    """Return the preset's settings whose names occur in `source` as options or attributes."""
    text = "\n".join(source.texts.values())
    return {
        setting.name
        for _, setting in (preset.settings.items() if preset.settings is not None else ())
        if re.search(rf'"{setting.name}"|[."]{place_of(setting.name)[-1]}\b', text)
    }


# Where the sources come from --------------------------------------------------------------------------------


def record(name: str, folder: Path | None) -> None:
    """Write the facts of a preset's framework into its file in `DATA`."""
    with tempfile.TemporaryDirectory() as made:
        if name in RELEASED:
            versions = [_unpacked(distribution, Path(made)) for distribution in RELEASED[name]]
            text, version, commit = ", ".join(versions), versions[0].split()[-1], ""
        else:
            text = REPOSITORIES[name]
            commit = _checked_out(folder or _cloned(text, Path(made, "repository")), Path(made, "source"))
            file, pattern = VERSIONS[name]
            said = re.search(pattern, Path(made, "source", file).read_text(), re.MULTILINE)
            version = ".".join(said.groups()) if said else sys.exit(f"{name}: no version in {file}")
        source = Source(Path(made) if name in RELEASED else Path(made, "source"))
        preset = read_preset(name, lambda _: version)
        functions, settings = facts_of(preset, source), settings_in(preset, source)
    facts = FrameworkFacts(text, version, commit, functions, tuple(sorted(settings)))
    DATA.mkdir(exist_ok=True)
    (DATA / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n")
    named = {f"{entry.module}:{entry.name}" for entry in preset.entries}
    gone = [f"  not there: {target}" for target in sorted(named - set(functions))]
    print(f"{name}: {version} {commit}", *gone, sep="\n")


def read_facts(name: str) -> FrameworkFacts:
    """Return the recorded facts of a preset's framework."""
    return msgspec.json.decode((DATA / f"{name}.json").read_bytes(), type=FrameworkFacts)


def _cloned(repository: str, folder: Path) -> Path:
    subprocess.run(["git", "clone", "--quiet", "--bare", "--depth", "1", repository, str(folder)], check=True)
    return folder


def _checked_out(repository: Path, folder: Path) -> str:
    """Copy the needed files of the repository's HEAD into `folder`, and return the commit."""
    git = ["git", "-C", str(repository)]
    listed = _output(*git, "ls-tree", "-r", "--name-only", "HEAD").decode().splitlines()
    names = [name for name in listed if _is_read(name)]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(_output(*git, "show", f"HEAD:{name}"))
    return _output(*git, "rev-parse", "HEAD").decode().strip()


def _is_read(name: str) -> bool:
    """Return whether a file of a source is needed: a module of a package, or a file with the version."""
    if name in {file for file, _ in VERSIONS.values()}:
        return True
    return name.endswith(".py") and not _NO_PACKAGE.search(name)


def _output(*command: str) -> bytes:
    return subprocess.run(command, capture_output=True, check=True).stdout


def _unpacked(distribution: str, folder: Path) -> str:
    """Unpack the newest release's modules into `folder`, and return its name and version."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), distribution], check=True)
    (archive,) = folder.glob("*.whl")
    with zipfile.ZipFile(archive) as wheel:
        for name in wheel.namelist():
            module = re.sub(r"^[^/]+\.data/purelib/", "", name)
            if _is_read(module) and (
                distribution != "ray" or module.startswith(("ray/rllib/", "ray/util/annot"))
            ):
                (folder / module).parent.mkdir(parents=True, exist_ok=True)
                (folder / module).write_bytes(wheel.read(name))
    archive.unlink()
    return " ".join(archive.name.split("-")[:2])


def main(given: Iterable[str]) -> None:
    """Record the preset that the command line names, or all presets."""
    name, *folders = [*given] or ["all"]
    if len(folders) > 1 or (name != "all" and name not in preset_names()):
        sys.exit(__doc__)
    for each in preset_names() if name == "all" else [name]:
        record(each, Path(folders[0]) if folders else None)


if __name__ == "__main__":
    main(sys.argv[1:])
