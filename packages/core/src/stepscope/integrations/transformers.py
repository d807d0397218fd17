"""A callback for the `Trainer` of transformers, and for those of TRL.

Trainer(..., callbacks=[StepscopeCallback(steps=[2])])
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stepscope.integrations.callback_steps import capture_steps

try:
    from transformers import TrainerCallback
except ImportError as error:
    message = "stepscope.integrations.transformers needs transformers. Fix: pip install transformers"
    raise ImportError(message) from error

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from stepscope.config import ProfileConfig, Settings

_ENTRIES: tuple[dict[str, object], ...] = (
    {
        "module": __name__,
        "name": "StepscopeCallback.on_step_begin",
        "step": "begin",
        "number": "state.global_step",
    },
    {"module": __name__, "name": "StepscopeCallback.on_step_end", "step": "end"},
    {"module": "transformers.trainer", "name": "Trainer.train", "step": "end"},
    {
        "module": "transformers.trainer",
        "name": "Trainer.compute_loss",
        "role": "actor",
        "stage": "update_actor_forward",
    },
    {
        "module": "accelerate.accelerator",
        "name": "Accelerator.backward",
        "role": "actor",
        "stage": "update_actor_backward",
    },
    {
        "module": "accelerate.optimizer",
        "name": "AcceleratedOptimizer.step",
        "role": "actor",
        "stage": "update_actor_optimizer",
    },
)
"""Bounds of a step, and the stages that every `Trainer` has. An exception leaves through `Trainer.train`."""


class StepscopeCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not see transformers
    """Captures the selected steps of the optimizer on every rank, numbered by `state.global_step`."""

    def __init__(
        self,
        source: ProfileConfig | Mapping[str, object] | str | os.PathLike[str] | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        """Configure this process. Arguments are those of `stepscope.configure`; none: what is configured.

        Raises:
            ConfigError: as `stepscope.configure`.
        """
        capture_steps(_ENTRIES, source, **settings)

    def on_step_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Open the capture of a selected step: see `_ENTRIES`."""

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Close it."""
