"""A callback for the `Trainer` of transformers, and for those of TRL.

Trainer(..., callbacks=[StepscopeCallback(steps=[2])])
"""

from __future__ import annotations

from stepscope.integrations.callback_steps import StepsCallback

try:
    from transformers import TrainerCallback
except ImportError as error:
    message = "stepscope.integrations.transformers needs transformers. Fix: pip install transformers"
    raise ImportError(message) from error

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
"""Entries that bound a step, and the stages of every `Trainer`. An exception propagates through
`Trainer.train`."""


class StepscopeCallback(StepsCallback, TrainerCallback):  # type: ignore[misc]  # mypy does not see transformers
    """Captures the selected steps of the optimizer on every rank, numbered by `state.global_step`."""

    entries = _ENTRIES

    def on_step_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Open the capture of a selected step: see `_ENTRIES`."""

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Close the capture."""
