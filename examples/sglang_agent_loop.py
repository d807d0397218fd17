"""An agent loop on SGLang with a tool, profiled: python examples/sglang_agent_loop.py

Each trajectory calls a calculator until it knows the answer. Captured steps have the engine's times of each
turn, and the trace of the engine's own profiler. The lines that profile are marked `# stepscope`. The tiny
model and the task come from `stepscope_report.demo`; a run takes a minute on a CPU. It needs SGLang and
`stepscope[cli,sglang]`.
"""

import asyncio
import random
import tempfile
from pathlib import Path

import sglang

from stepscope import aprepare, capture, configure, span, trajectory, turn  # stepscope
from stepscope_report.demo import task
from stepscope_report.demo.calculator import Calculator
from stepscope_report.demo.rollout import warmed_up, write_checkpoint
from stepscope_report.demo.task import Trajectory
from stepscope_sglang import record_request  # stepscope

STEPS, OPERATIONS = 4, (1, 1, 1, 2, 2, 3, 3, 8)
SAMPLING = {"max_new_tokens": task.TURN_TOKENS, "stop_token_ids": [*task.END_OF_TURN]}
ON_A_CPU = {
    "device": "cpu",
    "dtype": "float32",
    "model_impl": "transformers",  # SGLang's own Llama needs a kernel that some CPUs lack
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "context_length": 512,
    "max_total_tokens": 8 * 512,
    "max_running_requests": 8,
    "skip_tokenizer_init": True,
    "log_level": "error",
}


async def play(name: str, problem: task.Problem, engine: sglang.Engine, calculator: Calculator) -> float:
    """Return the reward of one trajectory."""
    played, left = Trajectory(name, problem), problem
    played.hear("^" + left.text)
    with trajectory(name):  # stepscope
        for index in range(problem.max_turns):
            with turn(index) as this_turn:  # stepscope
                answer = await engine.async_generate(input_ids=played.tokens, sampling_params=SAMPLING)
                record_request(this_turn, answer)  # stepscope: its times in queue, prefill and decode
                if not (call := played.say(answer["output_ids"])).endswith(">"):
                    break
                with span("tool", role="env"):  # stepscope
                    left = left.after(await calculator.ask(call[1:-1]))
                played.hear(left.text)
    return task.reward(problem, played.turns)


async def main(model: Path) -> None:
    roles = {"rollout": {"ranks": "all"}}
    configure(save_path="outputs/sglang_agent_loop", steps=[1, 3], roles=roles)  # stepscope
    async with Calculator() as calculator:  # first: asyncio cannot start processes beside the engine
        engine = sglang.Engine(
            model_path=str(model),
            sleep_on_idle=True,  # stepscope: no idle loops in the traces
            enable_metrics=True,  # stepscope: times for record_request
            **ON_A_CPU,
        )
        await aprepare(engines=engine)  # stepscope: finds errors now
        rng = random.Random(0)
        for step in range(STEPS):
            problems = [task.make_problem(rng, operations) for operations in OPERATIONS]
            async with capture(step, engines=engine):  # stepscope
                trajectories = (play(f"{step}-{i}", p, engine, calculator) for i, p in enumerate(problems))
                rewards = await asyncio.gather(*trajectories)
            print(f"step {step}: mean reward {sum(rewards) / len(rewards):.2f}")
    engine.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), warmed_up(updates=150))
        asyncio.run(main(Path(folder)))
    print("See where the steps went: stepscope report outputs/sglang_agent_loop")
