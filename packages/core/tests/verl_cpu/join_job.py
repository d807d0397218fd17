"""`python join_job.py FOLDER`: what processes of a Ray job have once they import verl.

Prints the steps that each of three actors captures: one that imports verl before the trainer publishes its
configuration, one after, and one that finds what cannot be read.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
from ray.experimental import internal_kv

from stepscope import ProfileConfig
from stepscope.integrations import verl as plugin


@ray.remote(num_cpus=0)
class Worker:
    def steps(self) -> str:
        import verl  # noqa: F401  # this loads the entry point

        from stepscope._recording.capture import configure

        return str(configure._configured and configure._configured.steps)


def main() -> None:
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    early, late, broken = (Worker.remote() for _ in range(3))  # type: ignore[attr-defined]  # an actor's class
    answers: list[Any] = [ray.get(early.steps.remote())]
    plugin.publish(ProfileConfig(save_path=sys.argv[1], steps=[2, 5], instrument=["verl"]))
    answers.append(ray.get(late.steps.remote()))
    key = plugin._key()
    assert key is not None
    internal_kv._internal_kv_put(key, b"{", overwrite=True, namespace="stepscope")
    answers.append(ray.get(broken.steps.remote()))
    print(*answers, sep="\n")


if __name__ == "__main__":
    main()
