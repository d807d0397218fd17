"""The sampler of counters: its rate, its ring, and sources that fail or are not there."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterable, Mapping
from decimal import Decimal
from itertools import count, pairwise

import pytest

from stepscope._recording.counters import catalogue
from stepscope._recording.counters import sampler as sampler_module
from stepscope._recording.counters.sampler import AbsentError, Sampler
from stepscope.backends.counters import CounterSource


class Ticks(CounterSource):
    """A source that counts its samples, and says when there were enough."""

    unit = ""

    def __init__(self, name: str = "ticks", *, enough: int = 5, interval_s: float = 0.0) -> None:
        self.name = name
        self.interval_s = interval_s
        self.numbers = count(1)
        self.last = 0
        self.enough = enough
        self.reached = threading.Event()
        self.closed = False

    def sample(self) -> Mapping[str, float]:
        self.last = next(self.numbers)
        if self.last >= self.enough:
            self.reached.set()
        return {"": float(self.last)}

    def close(self) -> None:
        self.closed = True


def values(sampler: Sampler, name: str) -> list[float]:
    (number,) = [series.series for series in sampler.series if series.name == name]
    return [tick.values[number] for tick in sampler.between(0, 1 << 62) if number in tick.values]


def run(sampler: Sampler, source: Ticks, hz: float = 100) -> None:
    sampler.start(hz)
    assert source.reached.wait(30)
    assert sampler.stop()


def sampled(*sources: Ticks, hz: float = 100, **options: int) -> Sampler:
    """Return the sampler of these sources, ended once the last of them had enough."""
    sampler = Sampler({"own": lambda: sources}, **options)
    run(sampler, sources[-1], hz)
    return sampler


def test_a_sample_after_the_thread_stood_still_has_its_own_time() -> None:
    class Stands(Ticks):
        def sample(self) -> Mapping[str, float]:
            time.sleep(0.06)  # as long as another thread holds the GIL
            return super().sample()

    first, second = Stands("first"), Ticks("second", enough=1)
    for one, other in pairwise(sampled(first, second).between(0, 1 << 62)):
        if 0 in one.values:
            assert (list(one.values), list(other.values)) == ([0], [1])
            assert other.at_ns - one.at_ns >= 60_000_000


def test_the_ring_keeps_the_latest() -> None:
    source = Ticks(enough=8)
    sampler = sampled(source, ticks=3)
    assert values(sampler, "ticks") == [source.last - 2, source.last - 1, source.last]
    assert source.closed


def test_the_rate_is_the_one_that_was_asked_for() -> None:
    began_ns = time.monotonic_ns()
    ticks = sampled(Ticks(enough=6), hz=20).between(0, 1 << 62)[:-1]  # the last one is that of the stop
    late_ns = [tick.at_ns - began_ns - 50_000_000 * number for number, tick in enumerate(ticks)]
    assert min(late_ns) > -5_000_000  # none before it is due; on a busy machine all may be late


def test_a_running_sampler_changes_its_rate_and_a_stopped_one_starts_again() -> None:
    source = Ticks(enough=3)
    sampler = Sampler({"own": lambda: [source]})
    sampler.start(0.001)
    sampler.start(200)
    assert source.reached.wait(30)
    assert sampler.stop()
    last = source.last
    source.enough, source.reached = last + 3, threading.Event()
    run(sampler, source)
    assert values(sampler, "ticks")[:last] == [float(number) for number in range(1, last + 1)]


def test_a_source_with_an_interval_is_asked_less_often() -> None:
    seldom = Ticks("seldom", interval_s=3600)
    sampled(seldom, Ticks(enough=20))
    assert seldom.last == 2  # at the first tick and at the last


def test_an_absent_source_is_a_reason_and_the_others_are_sampled() -> None:
    def missing() -> Iterable[CounterSource]:
        raise AbsentError("the library is not installed")

    source = Ticks()
    sampler = Sampler({"GPUs": missing, "own": lambda: [source]})
    run(sampler, source)
    assert list(sampler.absent) == ["GPUs"]
    assert [series.name for series in sampler.series] == ["ticks"]


class Broken(Ticks):
    def sample(self) -> Mapping[str, float]:
        if self.last == 2:
            raise OSError("the device is gone")
        return super().sample()


@pytest.mark.usefixtures("in_production")
def test_a_source_that_raises_is_not_asked_again() -> None:
    sampler = sampled(Broken("broken"), Ticks())
    assert values(sampler, "broken") == [1.0, 2.0]
    assert list(sampler.absent) == ["broken"]


class Odd(Ticks):
    def sample(self) -> Mapping[str, float]:
        super().sample()
        return {"a": float("nan"), "b": float("inf"), "c": 1.23456}


def test_values_that_json_has_not_are_left_out() -> None:
    sampler = sampled(Odd())
    assert [series.of for series in sampler.series] == ["a", "b", "c"]
    assert sampler.between(0, 1 << 62)[0].values == {2: 1.235}


class Small(Ticks):
    def sample(self) -> Mapping[str, float]:
        super().sample()
        return {"rate": Decimal("0.0000234567"), "float": array("f", [0.1])[0]}  # type: ignore[dict-item]


def test_small_values_keep_four_digits_and_numbers_of_any_type_are_written() -> None:
    sampler = sampled(Small())
    assert sampler.between(0, 1 << 62)[0].values == {0: 2.346e-05, 1: 0.1}
    assert sampler.means(0, 1 << 62)[sampler.series[0]] == 2.346e-05


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("name", None, "text"),
        ("unit", 3, "text"),
        ("kind", "gauge", "level, interval"),
        ("scope", "", "host"),
    ],
)
def test_a_wrong_field_of_an_installed_counter_is_named(field: str, value: object, allowed: str) -> None:
    source = Ticks()
    setattr(source, field, value)
    with pytest.raises(AbsentError, match=f"Ticks.{field} is {value!r}; allowed: .*{allowed}"):
        catalogue._checked(source)


def test_series_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "MOST_SERIES", 2)
    sampler = sampled(Ticks("a"), Ticks("b"), Ticks())
    assert [series.name for series in sampler.series] == ["a", "b"]


def test_a_source_that_answers_slowly_is_not_asked_out_of_turn_at_the_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The training waits for the stop, and a busy cluster answers in seconds."""
    monkeypatch.setattr(sampler_module, "_SLOW_NS", 0)
    slow, pace = Ticks("slow", interval_s=60), Ticks("pace")
    sampler = Sampler({"slow": lambda: [slow], "pace": lambda: [pace]})
    run(sampler, pace)
    assert slow.last == 1
    assert values(sampler, "pace")[-1] == pace.last  # which is asked at the stop as before


def test_values_of_earlier_moments_hide_no_sample_of_other_counters() -> None:
    class Dated(Ticks):
        def earlier(self) -> list[tuple[int, dict[str, float]]]:
            now_ns = time.monotonic_ns()
            return [(now_ns - 2_000_000, {"": 0.0}), (now_ns - 1_000_000, {"": 100.0})]

    sampler = sampled(Dated("dated", enough=6), Ticks("other", enough=6), hz=20)
    whole = [tick for tick in sampler.between(0, 1 << 62) if tick.whole]
    around = sampler.around(whole[1].at_ns - 500_000, whole[3].at_ns - 1_500_000)
    assert (around[0], around[-1]) == (whole[0], whole[3])
    assert sampler.means(whole[0].at_ns, whole[-1].at_ns)[sampler.series[0]] < 25
