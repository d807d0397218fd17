"""stepscope inside verl: a backend of its `Tracking`, and a tool of its `DistProfiler`.

From 0.9 on, verl loads this module wherever it is imported: it is an entry point of the group `verl.plugins`.
In older versions VERL_USE_EXTERNAL_MODULES names it. The preset `verl` loads it too. Each part waits until
verl imports what it belongs to, so this imports nothing of verl.

Where verl's own configuration selects stepscope, its trainer publishes that for the whole Ray job. A process
of the job that imports verl later, on whatever node, finds it here, before it imports what is instrumented.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import wrapt

from stepscope._recording.capture import configure
from stepscope._recording.process import failures
from stepscope.errors import ours
from stepscope.files import switch
from stepscope.integrations import verl_job

if TYPE_CHECKING:
    from types import ModuleType

_PLACES = {
    "verl.utils.tracking": "stepscope.integrations.verl_tracking",
    "verl.utils.profiler.profile": "stepscope.integrations.verl_profiler",
    "verl.trainer.ppo.ray_trainer": "stepscope.integrations.verl_trainer",
    "verl.trainer.ppo.v1.trainer_base": "stepscope.integrations.verl_trainer",
}
"""Module of verl -> the module whose `extend` gets it."""


def _extend(module: ModuleType) -> None:
    try:
        import_module(_PLACES[module.__name__]).extend(module)
    except ours() as error:  # the import is the user's, and succeeds
        failures.note(f"stepscope in {module.__name__}", error)


def _join_the_job() -> None:
    """Take the configuration that the trainer of this Ray job has published, if it has."""
    try:
        config = None if switch.DISABLED else verl_job.published()
        if config is not None:
            configure.start_up(config)
    except ours() as error:  # likewise
        failures.note("taking the configuration of verl's trainer", error)


for _name in _PLACES:
    wrapt.register_post_import_hook(_extend, _name)
_join_the_job()
