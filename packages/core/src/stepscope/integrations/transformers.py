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
    {  # what comes before `on_step_begin`
        "module": "transformers.trainer",
        "name": "Trainer.get_batch_samples",
        "step": "begin",
        "number": "self.state.global_step",
    },
    {
        "module": __name__,
        "name": "StepscopeCallback.on_step_begin",
        "step": "begin",
        "number": "state.global_step",
    },
    {"module": "transformers.trainer", "name": "Trainer.train", "step": "end"},
    {
        "module": "transformers.trainer",
        "name": "Trainer.get_batch_samples",
        "role": "trainer",
        "stage": "load_batch",
    },
    {"module": "transformers.trainer", "name": "Trainer.evaluate", "role": "trainer", "stage": "validate"},
    {
        "module": "transformers.trainer",
        "name": "Trainer._save_checkpoint",
        "role": "trainer",
        "stage": "save_checkpoint",
    },
    {
        "module": "transformers.trainer",
        "name": "Trainer.compute_loss",
        "role": "actor",
        "stage": "update_actor_forward",
        "where": {"model.training": True},
    },
    {
        "module": "accelerate.accelerator",
        "name": "Accelerator.backward",
        "role": "actor",
        "stage": "update_actor_backward",
    },
    {
        "module": "accelerate.accelerator",
        "name": "Accelerator.clip_grad_norm_",
        "role": "actor",
        "stage": "update_actor_clip",
    },
    {
        "module": "accelerate.optimizer",
        "name": "AcceleratedOptimizer.step",
        "role": "actor",
        "stage": "update_actor_optimizer",
    },
)
"""Entries that bound a step, and the stages of every `Trainer`. A step goes on until the next batch is
fetched, so that its evaluation and its checkpoint belong to it. An exception propagates through
`Trainer.train`."""


class StepscopeCallback(StepsCallback, TrainerCallback):  # type: ignore[misc]  # mypy does not see transformers
    """Captures the selected steps of the optimizer on every rank, numbered by `state.global_step`."""

    entries = _ENTRIES

    def on_step_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Open the capture of a selected step, if fetching its batch has not: see `_ENTRIES`."""
