"""Calls of Ray actors in the answer to `stepscope why`: of actors that do not record, and their callers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from stepscope.files.states import ProcessState, RayCall

RUNNING = "RUNNING"
MOST = 8
"""Calls of one actor that are listed."""


class RayCalls:
    """Open calls by actor. `asker` is the key of the process that asked Ray, the driver as a rule."""

    def __init__(self, states: Sequence[ProcessState]) -> None:
        self.asker: ProcessState | None = next((state for state in states if state.ray_calls), None)
        calls = () if self.asker is None else self.asker.ray_calls
        self._keys = {state.process.actor_id: state.process.key for state in states if state.process.actor_id}
        self._of: dict[str, list[RayCall]] = defaultdict(list)
        self._called: dict[str | None, set[str]] = defaultdict(set)
        for call in calls:
            self._of[call.actor].append(call)
            if call.caller != call.actor:
                self._called[call.caller].add(call.actor)

    def elsewhere(self) -> dict[str, list[RayCall]]:
        """Return {actor: calls that it runs} of those that do not record; those that wait if it runs none."""
        return {
            actor: ([call for call in calls if call.state == RUNNING] or calls)[:MOST]
            for actor, calls in self._of.items()
            if actor not in self._keys
        }

    def called_by(self, process: str) -> set[str]:
        """Return the processes, or actors, whose calls a process waits for.

        Args:
            process: `ProcessInfo.key`, or the id of an actor that does not record.
        """
        actors = set(self._called.get(self._actor_of(process), ()))
        if self.asker is not None and process == self.asker.process.key:
            actors |= self._called.get(None, set())
        return {self._keys.get(actor, actor) for actor in actors} - {process}

    def _actor_of(self, process: str) -> str:
        return next((actor for actor, key in self._keys.items() if key == process), process)
