"""stepscope inside verl: a backend of its `Tracking`, and a tool of its `DistProfiler`.

verl loads it where VERL_USE_EXTERNAL_MODULES, its own plugin point, names this module. The preset `verl`
loads it too. Each part waits until verl imports what it belongs to, so this imports nothing of verl.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import wrapt

from stepscope.errors import ours
from stepscope.recording.process import failures

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


for _name in _PLACES:
    wrapt.register_post_import_hook(_extend, _name)
