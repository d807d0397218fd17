"""Fixtures that several test files share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray of this test run's own, one for all of it: starting takes seconds. Kill the actors you make."""
    ray = pytest.importorskip("ray")
    # Below /tmp and short: the paths of Ray's sockets may not exceed 107 characters.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
        _temp_dir=folder,
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """What is done after captures is over, or ended, when the test is."""
    yield
    from stepscope.recording import finish

    finish.end("the test ended", 30, patient=False)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of a mirror's store."""
    return f"file://{tmp_path}/store"
