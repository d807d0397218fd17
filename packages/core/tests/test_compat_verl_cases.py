"""Behaviour that verl's own profiler tests check, of the stand-in, with verl's own configuration classes.

The cases are those of verl's tests/utils/test_nvtx_profile.py and test_special_mstx_profile.py (b178a3cd)
that do not look into the profiler behind `DistProfiler`.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from stepscope._recording.spans import slot
from stepscope.errors import VerlDifference
from stepscope.integrations.verl_dist_profiler import DistProfiler
from tests.downloads import wheel

pytest.importorskip("omegaconf")


@pytest.fixture(scope="module", params=["0.6.1", "0.7.1", "0.8.0", "0.9.1"])
def verl(request: pytest.FixtureRequest) -> Iterator[Any]:
    """`verl.utils.profiler.config` of a release, whose packages are not run: they import vLLM and more."""
    root = wheel(f"verl=={request.param}")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("verl", "verl.utils", "verl.utils.profiler"):
            package = ModuleType(name)
            package.__path__ = [str(root.joinpath(*name.split(".")))]
            patch.setitem(sys.modules, name, package)
        yield importlib.import_module("verl.utils.profiler.config")
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]


@pytest.fixture
def make(verl: Any, tmp_path: Path) -> Iterator[Any]:
    """Provide a profiler from the fields of verl's `ProfilerConfig`."""
    made = []

    def build(rank: int = 0, discrete: bool = False, **fields: Any) -> DistProfiler:
        options = verl.NsightToolConfig(discrete=discrete)
        config = verl.ProfilerConfig(tool="nsys", save_path=str(tmp_path), tool_config=None, **fields)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", VerlDifference)
            made.append(DistProfiler(rank, config=config, tool_config=options))
        return made[-1]

    yield build
    for profiler in made:
        profiler.stop()
    assert slot.active is None


def test_profiling_is_off_by_default(make: Any) -> None:
    assert not make().check_enable()
    assert not make(enable=False).check_enable()
    assert not DistProfiler(rank=0).check_enable()


@pytest.mark.parametrize(
    ("rank", "fields", "expected"),
    [
        (0, {"all_ranks": True}, True),
        (1, {"ranks": [1, 2]}, True),
        (3, {"ranks": [1, 2]}, False),
    ],
)
def test_ranks_are_those_of_the_configuration(
    make: Any, rank: int, fields: dict[str, Any], expected: bool
) -> None:
    assert make(rank, enable=True, **fields).check_this_rank() is expected


@pytest.mark.parametrize("discrete", [False, True])
def test_a_step_is_on_between_start_and_stop(make: Any, discrete: bool) -> None:
    profiler = make(enable=True, all_ranks=True, discrete=discrete)
    assert not profiler.check_this_step()
    profiler.start(role="worker", profile_step="1")
    assert profiler.check_this_step()
    profiler.start(role="worker", profile_step="1")
    profiler.stop()
    assert not profiler.check_this_step()
    assert profiler.is_discrete_mode() is discrete


def test_profilers_of_one_process_share_what_the_first_started(make: Any) -> None:
    first, second = make(enable=True, ranks=[0]), make(enable=True, ranks=[0])
    first.start(profile_step=1)
    session = slot.active
    second.start(profile_step=1)
    assert slot.active is session
    first.stop()
    assert slot.active is None


@pytest.mark.parametrize("fields", [{"enable": True, "all_ranks": True}, {"enable": False}])
@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("message", ["test", None])
def test_an_annotated_method_returns_what_it_returns(
    make: Any, fields: dict[str, Any], started: bool, message: str | None
) -> None:
    worker = MagicMock()
    worker.profiler = make(**fields)
    if started:
        worker.profiler.start(profile_step=1)

    @worker.profiler.annotate(message=message)  # type: ignore[untyped-decorator]  # a mock's
    def test_func(self: object, *args: object, **kwargs: object) -> str:
        return "result"

    assert test_func(worker) == "result"
