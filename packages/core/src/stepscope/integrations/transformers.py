"""A callback for the `Trainer` of transformers and the trainers of TRL.

Trainer(..., callbacks=[StepscopeCallback(steps=[2])])
"""

from __future__ import annotations

from stepscope.integrations import StepsCallback

try:
    from transformers import TrainerCallback
except ImportError as error:
    message = "stepscope.integrations.transformers needs transformers. Fix: pip install transformers"
    raise ImportError(message) from error

_ENTRIES: tuple[dict[str, object], ...] = (
    {  # begins the step with its batch, before `on_step_begin`
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
"""Entries that begin and end steps, and the stages of a step. A step lasts until the next batch is fetched,
so that evaluation and checkpoint after the update belong to the step. The last step ends with
`Trainer.train`, also after an exception."""


class StepscopeCallback(StepsCallback, TrainerCallback):  # type: ignore[misc]  # mypy does not see transformers
    """Callback that captures the selected steps on every rank. Steps are counted by `state.global_step`."""

    entries = _ENTRIES

    def on_step_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Begin the step, unless the fetch of its batch has begun the step: see `_ENTRIES`."""
