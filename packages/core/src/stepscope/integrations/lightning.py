"""A callback for Lightning's `Trainer`, of the package lightning or pytorch_lightning.

Trainer(..., callbacks=[StepscopeCallback(steps=[2])])
"""

from __future__ import annotations

from stepscope.integrations.callback_steps import StepsCallback

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
"""Entries that bound a step, and the stages of every module. A step begins with its first batch, and goes on
until the optimizer's next one, so that its evaluation and checkpoint belong to it. An exception propagates
through `Trainer.fit`."""


class StepscopeCallback(StepsCallback, Callback):  # type: ignore[misc]  # mypy does not see lightning
    """Captures the selected steps of the optimizer on every rank, numbered by `trainer.global_step`.

    Batches whose gradients are accumulated belong to one step.
    """

    entries = _ENTRIES
