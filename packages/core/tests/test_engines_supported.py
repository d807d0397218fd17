"""Versions of an engine against the range that its adapter states."""

from __future__ import annotations

import pytest

from stepscope.engines import supported
from stepscope.engines.supported import Supported, expect_supported, stated_in
from stepscope.errors import EngineError

TESTED = Supported("mine", "0.5.3", "0.5.23")


@pytest.mark.parametrize("marker", ["extra == 'engine'", 'extra=="engine"'])
def test_the_range_is_that_of_the_engine_extra(marker: str) -> None:
    lines = ["stepscope==0.1.0", "httpx>=1,<=2; extra == 'other'", f"mine<=0.5.23,>=0.5.3; {marker}"]
    assert stated_in(lines) == TESTED
    assert stated_in(lines[:2]) is None


@pytest.mark.parametrize("version", ["0.5.3", "0.5.23.post1+cpu", "0.5.9rc1", "unknown", None])
def test_a_version_in_the_range_says_nothing(version: str | None, caplog: pytest.LogCaptureFixture) -> None:
    expect_supported(TESTED, version)
    assert not caplog.records


def test_an_older_version_is_refused_with_the_range_and_the_command() -> None:
    with pytest.raises(EngineError, match=r"0\.5\.2 .* 0\.5\.3 to 0\.5\.23.* install 'mine>="):
        expect_supported(TESTED, "0.5.2")


def test_a_newer_version_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    supported._warn.cache_clear()
    for _ in range(2):
        expect_supported(TESTED, "0.6.0")
    (record,) = caplog.records
    assert " mine 0.5.3 to 0.5.23" in record.getMessage()
