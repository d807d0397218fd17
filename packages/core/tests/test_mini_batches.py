"""Schedules count as torch's do."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.backends.scheduled_window import Phase, Place, first_active, place
from stepscope.config import ScheduleConfig

few = st.integers(0, 4)


def test_without_a_schedule_all_is_recorded() -> None:
    assert {place(None, number) for number in range(5)} == {Place("active", 0)}


@pytest.mark.needs("torch")
@settings(deadline=None)  # the first example imports torch
@given(skip_first=few, wait=few, warmup=few, active=st.integers(1, 4), repeat=few, number=st.integers(0, 60))
def test_it_agrees_with_torch(
    skip_first: int, wait: int, warmup: int, active: int, repeat: int, number: int
) -> None:
    from torch import profiler

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's advice to warm up
        theirs = profiler.schedule(
            skip_first=skip_first, wait=wait, warmup=warmup, active=active, repeat=repeat
        )
    ours = ScheduleConfig(skip_first=skip_first, wait=wait, warmup=warmup, active=active, repeat=repeat)
    phases: Mapping[object, Phase] = {
        profiler.ProfilerAction.NONE: "off",
        profiler.ProfilerAction.WARMUP: "warmup",
        profiler.ProfilerAction.RECORD: "active",
        profiler.ProfilerAction.RECORD_AND_SAVE: "active",
    }
    assert place(ours, number).phase == phases[theirs(number)]
    assert place(ours, first_active(ours)).phase == "active"
