"""The `engine` extra of this distribution is the range that holds at run time."""

from __future__ import annotations

import pytest

from stepscope.engines import supported
from stepscope.engines.supported import supported_by
from stepscope.errors import EngineError
from stepscope_sglang import _versions


def test_an_engine_above_the_range_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    supported._warn.cache_clear()
    _versions.check("99.0.0")
    (record,) = caplog.records
    assert f"newer than {supported_by(_versions.ADAPTER)}" in record.getMessage()


def test_an_engine_below_the_range_is_refused() -> None:
    with pytest.raises(EngineError, match="pip install 'sglang>="):
        _versions.check("0.0.1")
