"""A stand-in for SGLang's request class if SGLang is not installed, else one engine for the whole process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from fake_sglang import ProfileReq
from tiny_sglang import settings, write_model

from stepscope_sglang import _versions
from stepscope_sglang._capture import session


@pytest.fixture(autouse=True)
def _requests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.path.parent.name != "real":
        monkeypatch.setattr(_versions, "profile_request", lambda: ProfileReq)
    monkeypatch.setattr(session, "_owed", deque(maxlen=16))


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import sglang

    engine = sglang.Engine(**settings(write_model(tmp_path_factory.mktemp("model"))))
    yield engine
    engine.shutdown()
