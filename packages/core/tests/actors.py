"""Ray actors that tests kill."""

from __future__ import annotations

from typing import Any

import pytest

ray = pytest.importorskip("ray")


def end(actor: Any) -> None:
    """Kill an actor and wait until it is dead: after `ray.kill` it may still answer a call."""
    ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):
        while True:
            ray.get(actor.__ray_ready__.remote())
