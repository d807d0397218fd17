"""A loop with slow steps, and its fix: python examples/slow_step.py [--fixed]

It needs no Ray, torch or GPU: sleeps stand for the engine, the sandboxes and the training. docs/tutorial.md
records this loop, reads its report, finds the cause, and proves the fix.
"""

import asyncio
import sys
import time

from stepscope import aprepare, capture, configure, profile_step, span, trajectory, turn

FIXED = "--fixed" in sys.argv
FOLDER = "outputs/slow_step/after" if FIXED else "outputs/slow_step/before"
SANDBOXES = asyncio.Semaphore(16 if FIXED else 2)


async def call_tool() -> None:
    """Run a tool as soon as a sandbox is free."""
    with span("queue", role="env"):
        await SANDBOXES.acquire()
    with span("tool", role="env", attrs={"name": "sandbox"}):
        await asyncio.sleep(0.02)
    SANDBOXES.release()


async def play(number: int) -> float:
    """Run one trajectory: two to four turns, each of which generates and calls a tool."""
    with trajectory(f"{number}"):
        for index in range(2 + number % 3):
            with turn(index):
                with span("generate", role="rollout"):
                    await asyncio.sleep(0.04)
                await call_tool()
    return float(number % 2)


@profile_step(role="reward")
def compute_reward(results: list[float]) -> float:
    time.sleep(0.01)
    return sum(results) / len(results)


@profile_step(role="actor")
def update_actor(reward: float) -> None:
    time.sleep(0.12)


@profile_step(role="actor")
def sync_weights() -> None:
    time.sleep(0.02)


async def main() -> None:
    # Record spans only: nothing here runs on torch.
    configure(save_path=FOLDER, steps=[4, 8], roles={"*": {"profiler": "off"}})
    await aprepare()
    for step in range(10):
        started = time.monotonic()
        async with capture(step):
            results = await asyncio.gather(*(play(number) for number in range(16)))
            reward = compute_reward(list(results))
            update_actor(reward)
            sync_weights()
        print(f"step {step}: {time.monotonic() - started:.2f} s, mean reward {reward:.3f}")


if __name__ == "__main__":
    asyncio.run(main())
    print(f"See where the steps went: stepscope report {FOLDER}")
