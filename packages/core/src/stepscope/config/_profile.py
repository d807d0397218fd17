"""The whole configuration of a run, and the ways to get one."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, TypedDict

import msgspec

from stepscope.config._fields import Parser, Section, build, items_of
from stepscope.config._instrument import InstrumentConfig, parse_instrument
from stepscope.config._roles import RoleConfig, parse_roles
from stepscope.config._sections import (
    BudgetConfig,
    ControlConfig,
    CountersConfig,
    CudaMemoryConfig,
    ExportConfig,
    FinishConfig,
    NpuConfig,
    NsysConfig,
    RecorderConfig,
    ThroughputConfig,
    TorchConfig,
    parse_counters,
)
from stepscope.config._sources import environment_layer, file_layer, overlay, refuse_verl
from stepscope.config._steps import StepRange, StepSpec, parse_steps
from stepscope.errors import ConfigError, VerlDifference

if TYPE_CHECKING:
    from typing_extensions import Unpack

Mode: TypeAlias = Literal["continuous", "discrete"]
Record: TypeAlias = Literal["off", "spans"]


class UnnamedPath(str):
    """The type of the default of `save_path`. It distinguishes the default from a path that was set, because
    the flight recorder writes only to a path that was set.
    """

    __slots__ = ()


_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)


def _parse_path(value: object, field: str) -> str:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise ConfigError(field, value, "the path of a folder", "write a path: outputs/profile")
    if url := _URL.match(path):
        local = f"/{url[2].lstrip('/')}" if url[1] == "file" else "outputs/profile"
        fix = f"write a local path ({local}); finish.command can copy each captured step to {path}"
        raise ConfigError(field, value, "a path in the file system, not a URL", fix)
    return path if isinstance(path, UnnamedPath) else os.path.expanduser(path)


def _parse_tool(value: object, field: str) -> str:
    """Return the name of a backend. `check_tool` checks later that the backend exists."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(field, value, "the name of an installed backend", "write tool: torch")
    return value


def _parse_patterns(value: object, field: str) -> tuple[str, ...]:
    items = items_of(value)
    if items is None or not all(isinstance(item, str) and item for item in items):
        fix = 'write ["prompt*", "*_token"]; a function is registered with stepscope.redact'
        raise ConfigError(field, value, "a list of names or globs of attributes", fix)
    return tuple(dict.fromkeys(map(str, items)))


DEFAULT_ROLES: Mapping[str, RoleConfig] = {
    # No profiler in rollouts: a replica with a profiler would be the slowest of equal replicas.
    "rollout": RoleConfig(ranks="all", profiler=False),
    "*": RoleConfig(),
}
"""The default of `roles`."""


class Settings(TypedDict, total=False):
    """Types that each setting accepts. `ProfileConfig` converts the value to the type of the field."""

    save_path: str | os.PathLike[str]
    steps: StepSpec | Iterable[StepSpec]
    tool: str
    mode: Mode
    record: Record
    recorder: RecorderConfig | Mapping[str, object]
    collectives: bool
    roles: Mapping[str, RoleConfig | Mapping[str, object]]
    redact: str | Iterable[str]
    instrument: Iterable[InstrumentConfig | Mapping[str, object] | str]
    torch: TorchConfig | Mapping[str, object]
    npu: NpuConfig | Mapping[str, object]
    nsys: NsysConfig | Mapping[str, object]
    cuda_memory: CudaMemoryConfig | Mapping[str, object]
    counters: CountersConfig | Mapping[str, object] | str | bool
    throughput: ThroughputConfig | Mapping[str, object]
    budget: BudgetConfig | Mapping[str, object]
    export: ExportConfig | Mapping[str, object]
    control: ControlConfig | Mapping[str, object]
    finish: FinishConfig | Mapping[str, object]


class ProfileConfig(Section, frozen=True, kw_only=True):
    """Configuration of a run. Its fields are checked on construction; a wrong value raises `ConfigError`.

    The constructor reads no file and no environment variables. `configure` reads both: the file overrides
    the defaults, `STEPSCOPE_*` variables override the file, and arguments override all. A `ProfileConfig`
    that is passed to `configure` is used unchanged.
    """

    _parsers: ClassVar[Mapping[str, Parser]] = {
        "save_path": _parse_path,
        "tool": _parse_tool,
        "steps": parse_steps,
        "roles": parse_roles,
        "instrument": parse_instrument,
        "redact": _parse_patterns,
        "counters": parse_counters,
    }

    save_path: str = UnnamedPath("outputs/profile")
    """The run's folder. If no folder is set, captures go to the default, and the flight recorder writes
    nothing. `~` is expanded when the config is made. On Ray the path must be absolute. Elsewhere a relative
    path is resolved from the working directory when `configure` is called, else at the first capture."""
    steps: tuple[StepRange, ...] = ()
    """Steps to capture; empty by default."""
    tool: str = "torch"
    """The profiler of the selected processes: a name among the entry points `stepscope.backends`."""
    mode: Mode = "continuous"
    """`continuous`: one trace per process for the whole capture. `discrete`: one per stage."""
    record: Record = "spans"
    """Data that is kept of steps that are not captured. `spans`: every process keeps the spans of the last
    steps in memory, one line per step is written, and a trigger of `recorder` writes the spans too. Nothing
    is written if `save_path` is not set. `off`: only the duration of each step is kept."""
    recorder: RecorderConfig = msgspec.field(default_factory=RecorderConfig)
    collectives: bool = True
    """Record each call of a torch.distributed collective, and each wait for one, as a span."""
    roles: dict[str, RoleConfig] = msgspec.field(default_factory=lambda: dict(DEFAULT_ROLES))
    """{role name or glob: settings}. The first pattern that matches a role applies. A role that no pattern
    matches is not profiled."""
    redact: tuple[str, ...] = ()
    """Names or globs of span attributes whose values are not written. Add `error` to leave out the texts of
    exceptions."""
    instrument: tuple[InstrumentConfig, ...] = ()
    """Functions to record in every process without an edit of their source, and presets of frameworks."""
    torch: TorchConfig = msgspec.field(default_factory=TorchConfig)
    npu: NpuConfig = msgspec.field(default_factory=NpuConfig)
    nsys: NsysConfig = msgspec.field(default_factory=NsysConfig)
    cuda_memory: CudaMemoryConfig = msgspec.field(default_factory=CudaMemoryConfig)
    counters: CountersConfig = msgspec.field(default_factory=CountersConfig)
    throughput: ThroughputConfig = msgspec.field(default_factory=ThroughputConfig)
    budget: BudgetConfig = msgspec.field(default_factory=BudgetConfig)
    export: ExportConfig = msgspec.field(default_factory=ExportConfig)
    control: ControlConfig = msgspec.field(default_factory=ControlConfig)
    finish: FinishConfig = msgspec.field(default_factory=FinishConfig)

    if TYPE_CHECKING:  # the types that are accepted; the fields above have the types that are stored

        def __init__(self, **settings: Unpack[Settings]) -> None: ...

    @classmethod
    def from_mapping(cls, data: Mapping[str, object]) -> ProfileConfig:
        """Return a config from a mapping of the same form as the YAML file and `to_mapping()`, over the
        defaults.

        Raises:
            ConfigError: a field is unknown or wrong. The error states the dotted name, the value, what
                is allowed and the fix.
        """
        return build(cls, data, "")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> ProfileConfig:
        """Return a config from a YAML or JSON file, over the defaults.

        Raises:
            ConfigError: as `from_mapping`; also when the file cannot be read or is not YAML.
        """
        return build(cls, file_layer(cls, path), "")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> ProfileConfig:
        """Return a config from the file named by STEPSCOPE_CONFIG, if set, and the `STEPSCOPE_*` variables
        over it.

        Raises:
            ConfigError: as `from_file`; also for an unknown `STEPSCOPE_` variable.
        """
        return resolve(environ=environ)

    @classmethod
    def from_verl(cls, source: object) -> ProfileConfig:
        """Return a config that does what verl's own settings ask for: `global_profiler`, and `profiler` of
        each role (verl 0.7.1 to 0.9).

        A `VerlDifference` warning names each setting that has another meaning here or no counterpart.
        docs/verl.md has the table.

        Args:
            source: verl's whole configuration: a mapping, an OmegaConf `DictConfig`, or the path of a YAML
                file.

        Raises:
            ConfigError: `source` is of another type, has a key of an older release, or asks for a tool that
                stepscope does not have.
        """
        from stepscope.config._verl import read_verl

        settings, differences = read_verl(source)
        for difference in differences:
            warnings.warn(difference, VerlDifference, stacklevel=2)
        return build(cls, settings, "")

    def to_mapping(self) -> dict[str, object]:
        """Return all fields, with defaults, as JSON values. `from_mapping` makes an equal config of them."""
        return {name: _plain(getattr(self, name)) for name in self.__struct_fields__}

    def to_settings(self) -> dict[str, object]:
        """Return `to_mapping()`, without `save_path` if it was not set, so that `from_mapping` leaves it
        unset too.
        """
        return {
            name: value for name, value in self.to_mapping().items()
            if name != "save_path" or self.names_folder
        }  # fmt: skip

    @property
    def names_folder(self) -> bool:
        """True if `save_path` was set."""
        return not isinstance(self.save_path, UnnamedPath)

    def selects(self, step: int) -> bool:
        """Return whether `step` is one of the captured steps."""
        for steps in self.steps:  # noqa: SIM110 # called in every step: a generator would cost more
            if step in steps:
                return True
        return False

    def role(self, name: str) -> tuple[str, RoleConfig] | None:
        """Return (pattern, settings) of the first pattern in `roles` that matches `name`; None if there is
        none. Case matters.
        """
        return next(((at, role) for at, role in self.roles.items() if fnmatchcase(name, at)), None)


def resolve(
    file: ProfileConfig | Mapping[str, object] | str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    **python: Unpack[Settings],
) -> ProfileConfig:
    """Return the run's config: defaults < file (else STEPSCOPE_CONFIG) < `STEPSCOPE_*` < `python`.

    `file` may also be a mapping of settings, or a `ProfileConfig`, which is returned unchanged. Mappings are
    merged key by key; other values are replaced. A role that a higher layer adds is inserted before the first
    pattern that would match it.

    Args:
        environ: Environment variables; `os.environ` by default.
        python: Fields of `ProfileConfig`.

    Raises:
        ConfigError: as `ProfileConfig.from_env`; also for arguments next to a ready `ProfileConfig`.
    """
    if isinstance(file, ProfileConfig):
        if python:
            name, value = next(iter(python.items()))
            allowed = "no argument next to a ready ProfileConfig, which is taken exactly as it is"
            fix = "set it in that config (its replace() makes a changed copy)"
            raise ConfigError(name, value, allowed, fix)
        return file
    environ = os.environ if environ is None else environ
    layer: Mapping[str, object] = {}
    if file is not None:
        layer = _given_layer(file)
    elif environ.get("STEPSCOPE_CONFIG"):
        layer = file_layer(ProfileConfig, environ["STEPSCOPE_CONFIG"], named_by="STEPSCOPE_CONFIG")
    layer = overlay(layer, environment_layer(ProfileConfig, environ))
    return build(ProfileConfig, overlay(layer, python), "")


def folder_of(file: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> ProfileConfig | None:
    """Return the default config with the `save_path` of `file` or the environment. Other settings are
    ignored, even if they are wrong. Return None if `save_path` is wrong or the file cannot be read.
    """
    from stepscope.config._yaml import load

    file = file or environ.get("STEPSCOPE_CONFIG")
    try:
        given = dict(load(file, "the configuration file")) if file else {}
        if "STEPSCOPE_SAVE_PATH" in environ:
            given["save_path"] = environ["STEPSCOPE_SAVE_PATH"]
        return build(ProfileConfig, {key: given[key] for key in ("save_path",) if key in given}, "")
    except ConfigError:
        return None


def _given_layer(source: object) -> Mapping[str, object]:
    if isinstance(source, Mapping):
        refuse_verl(source, "configure(source)")
        build(ProfileConfig, source, "")  # checks the mapping without the other layers, as for a file
        return source
    if isinstance(source, (str, os.PathLike)):
        return file_layer(ProfileConfig, source)
    allowed = "a file's path, a mapping of settings, or a ProfileConfig"
    raise ConfigError("configure(source)", source, allowed, 'write configure("stepscope.yaml")')


def _plain(value: object) -> object:
    if isinstance(value, StepRange):
        return value.spelled
    if isinstance(value, Section):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, UnnamedPath):
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
