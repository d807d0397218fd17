"""A callback for Lightning's `Trainer`, of the package lightning or pytorch_lightning.

Trainer(..., callbacks=[StepscopeCallback(steps=[2])])
"""

from __future__ import annotations

from typing import Protocol

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
        "module": __name__,
        "name": "StepscopeCallback.on_train_batch_start",
        "step": "begin",
        "number": "trainer.global_step",
    },
    {"module": __name__, "name": "StepscopeCallback.end_step", "step": "end"},
    {"module": f"{_PACKAGE}.trainer.trainer", "name": "Trainer.fit", "step": "end"},
    {**_STRATEGY, "name": "Strategy.training_step", "stage": "update_actor_forward"},
    {**_STRATEGY, "name": "Strategy.backward", "stage": "update_actor_backward"},
    {**_STRATEGY, "name": "Strategy.optimizer_step", "stage": "update_actor_optimizer"},
)
"""Entries that bound a step, and the stages of every module. An exception propagates through
`Trainer.fit`."""


class Trainer(Protocol):
    """The part of Lightning's trainer that is used."""

    @property
    def global_step(self) -> int: ...


class StepscopeCallback(StepsCallback, Callback):  # type: ignore[misc]  # mypy does not see lightning
    """Captures the selected steps of the optimizer on every rank, numbered by `trainer.global_step`.

    Batches whose gradients are accumulated belong to one step.
    """

    entries = _ENTRIES
    _step: int | None = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: object, batch: object, batch_idx: int
    ) -> None:
        """Open the capture of a selected step, unless it is open: see `_ENTRIES`."""
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: object, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """End the step if the optimizer took one."""
        if trainer.global_step != self._step:
            self.end_step()

    def end_step(self) -> None:
        """Close the capture: see `_ENTRIES`."""
