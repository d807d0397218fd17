"""The agent loop: a trajectory is a conversation of a replica and the calculator; many run at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope import carrier, span, trajectory, turn
from stepscope_report.demo import task
from stepscope_report.demo.batch import Trajectory
from stepscope_report.demo.calculator import Calculator

if TYPE_CHECKING:
    from ray.actor import ActorHandle


async def play(
    name: str, problem: task.Problem, replica: ActorHandle[Any], calculator: Calculator, policy_version: int
) -> Trajectory:
    """Work on `problem` until the model answers, is cut off, or has used up its turns."""
    played, left = Trajectory(name, problem), problem
    played.hear("^" + left.text)
    with trajectory(name, policy_version=policy_version):
        for index in range(problem.max_turns):
            with turn(index):
                call = await _generate(played, index, replica)
                if not call.endswith(">"):
                    break
                with span("tool", role="env"):
                    result = await calculator.ask(call[1:-1])
            left = left.after(result)
            played.hear((task.REFUSED if result == task.REFUSED else "") + left.text)
        with span("compute_reward", role="reward") as scored:
            played.reward = task.reward(problem, played.turns)
            scored.set(reward=played.reward)
    return played


async def _generate(played: Trajectory, index: int, replica: ActorHandle[Any]) -> str:
    with span("generate", role="rollout") as generating:
        # With the carrier, the spans of the replica become children of this span.
        tokens = await replica.generate.remote(played.tokens, f"{played.name}-{index}", carrier())
        generating.set(tokens=len(tokens))
    return played.say(tokens)
