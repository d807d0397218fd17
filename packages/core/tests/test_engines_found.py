"""From what is given to `capture(engines=)` to the adapter that knows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint, EntryPoints, version

import pytest

from stepscope._recording.fanout.participants import profilers_of
from stepscope._recording.process.identity import versions
from stepscope.engines import (
    EngineCapture,
    EngineFactory,
    EngineProfiler,
    EngineProfilerBase,
    load_engine,
    protocol,
    recognise,
)
from stepscope.engines.own_thread import users_loop
from stepscope.engines.protocol import installed
from stepscope.errors import ConfigError, EngineError
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler

LIVE: list[FakeEngine] = []


class Factory(EngineFactory):
    distributions = ("msgspec", "fake-engine")

    def recognises(self, engine: object) -> bool:
        return isinstance(engine, FakeEngine)

    def owned(self) -> Sequence[object]:
        return LIVE

    def __call__(self, engine: object, replica: int) -> EngineProfiler:
        assert isinstance(engine, FakeEngine)
        return FakeEngineProfiler(engine, replica)


factory = Factory()


@pytest.fixture(autouse=True)
def adapters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two: `fake`, and `aaa`, which cannot be loaded."""
    here = EntryPoint("fake", f"{__name__}:factory", "stepscope.engines")
    broken = EntryPoint("aaa", "no.such.module:factory", "stepscope.engines")
    monkeypatch.setattr(EntryPoint, "load", lambda point: factory if point.name == "fake" else 1 / 0)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: EntryPoints([broken, here]))
    monkeypatch.setattr(FakeEngine, "__module__", "fake.engine")
    monkeypatch.setattr(f"{__name__}.LIVE", [])
    installed.cache_clear()
    yield
    installed.cache_clear()


def test_adapters_are_looked_for_once_and_again_after_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    first = installed()
    assert installed() is first
    with pytest.raises(EngineError, match="engine 'later'"):
        load_engine("later")
    later = EntryPoint("later", f"{__name__}:factory", "stepscope.engines")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: EntryPoints([later]))
    assert list(installed()) == ["later"]


def test_an_entry_point_that_names_a_class_is_told_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EntryPoint, "load", lambda point: Factory)
    with pytest.raises(EngineError, match=r"fake = .*FACTORY = Factory\(\)"):
        load_engine("fake")
    with pytest.raises(EngineError, match="names a class"):
        recognise(FakeEngine(), 0)


def test_synchronous_code_has_no_event_loop_for_an_engine() -> None:
    assert users_loop() is None


def test_the_run_records_the_versions_of_the_engines_that_adapters_name() -> None:
    assert protocol.distributions() == ["aaa", "fake", "msgspec", "fake-engine"]  # `aaa` is not loaded
    assert versions()["msgspec"] == version("msgspec")
    assert "fake-engine" not in versions()


def test_an_engine_goes_to_the_adapter_that_is_named_as_its_library_before_any_other() -> None:
    assert recognise(FakeEngine(), 2).replica == 2


def test_a_name_stands_for_the_engines_of_this_process() -> None:
    LIVE.extend([FakeEngine(), FakeEngine()])
    profilers = profilers_of("fake")
    assert [profiler.replica for profiler in profilers] == [0, 1]
    assert [getattr(profiler, "engine", None) for profiler in profilers] == LIVE


def test_a_name_and_an_engine_can_stand_side_by_side() -> None:
    LIVE.append(FakeEngine())
    profilers = profilers_of(["fake", FakeEngineProfiler(FakeEngine())])
    assert [profiler.replica for profiler in profilers] == [0, 1]


def test_a_name_that_stands_for_nothing_says_what_to_pass() -> None:
    with pytest.raises(ConfigError, match=r"'fake'.*RayRollout\(actor\)"):
        profilers_of("fake")


def test_an_unknown_name_lists_the_adapters_and_how_to_install_one() -> None:
    with pytest.raises(ConfigError, match=r"aaa, fake.*\[vllm"):
        profilers_of("vlm")


def test_a_misspelt_name_suggests_the_one_that_is_meant() -> None:
    with pytest.raises(ConfigError, match=r"mean 'fake'\?"):
        profilers_of("fakes")


def test_a_url_is_asked_which_engine_serves_there() -> None:
    with pytest.raises(ConfigError, match=r"VllmServer\(url\)"):
        profilers_of(["http://127.0.0.1:8000"])


def test_a_profiler_without_its_stop_cannot_be_made() -> None:
    class Unfinished(EngineProfilerBase):
        @property
        def world_size(self) -> int:
            return 1

        def check(self) -> None: ...

        async def start(self, capture: EngineCapture) -> None: ...

    with pytest.raises(TypeError, match="stop"):
        Unfinished()  # type: ignore[abstract]  # the subject
