"""A callback for Lightning's `Trainer`, in the package lightning or pytorch_lightning.

Trainer(..., callbacks=[StepscopeCallback(steps=[2])])
"""

from __future__ import annotations

from stepscope.integrations import StepsCallback

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        message = "stepscope.integrations.lightning needs lightning. Fix: pip install lightning"
        raise ImportError(message) from error

_PACKAGE = Callback.__module__.removesuffix(".callbacks.callback")
_STRATEGY = {"module": f"{_PACKAGE}.strategies.strategy", "role": "actor"}
_ENTRIES: tuple[dict[str, object], ...] = (
    {
        "module": f"{_PACKAGE}.loops.training_epoch_loop",
        "name": "_TrainingEpochLoop.advance",
        "step": "begin",
        "number": "self.trainer.global_step",
    },
    {"module": f"{_PACKAGE}.trainer.trainer", "name": "Trainer.fit", "step": "end"},
    {
        "module": f"{_PACKAGE}.loops.fetchers",
        "name": "_PrefetchDataFetcher.__next__",
        "role": "trainer",
        "stage": "load_batch",
    },
    {
        "module": f"{_PACKAGE}.loops.evaluation_loop",
        "name": "_EvaluationLoop.run",
        "role": "trainer",
        "stage": "validate",
    },
    {
        "module": f"{_PACKAGE}.trainer.trainer",
        "name": "Trainer.save_checkpoint",
        "role": "trainer",
        "stage": "save_checkpoint",
    },
    {
        "module": f"{_PACKAGE}.plugins.precision.precision",
        "name": "Precision.clip_gradients",
        "role": "actor",
        "stage": "update_actor_clip",
    },
    {**_STRATEGY, "name": "Strategy.training_step", "stage": "update_actor_forward"},
    {**_STRATEGY, "name": "Strategy.backward", "stage": "update_actor_backward"},
    {**_STRATEGY, "name": "Strategy.optimizer_step", "stage": "update_actor_optimizer"},
)
"""Entries that begin and end steps, and the stages of a step. A step begins with its first batch and lasts
until the first batch of the next step, so that evaluation and checkpoint after the update belong to the step.
The last step ends with `Trainer.fit`, also after an exception."""


class StepscopeCallback(StepsCallback, Callback):  # type: ignore[misc]  # mypy does not see lightning
    """Callback that captures the selected steps on every rank. Steps are counted by `trainer.global_step`.

    Batches whose gradients are accumulated belong to one step.
    """

    entries = _ENTRIES
