"""An agent loop on vLLM with a tool, profiled: python examples/vllm_agent_loop.py

Each trajectory calls a calculator until it knows the answer. Captured steps have the engine's times of each
turn, and the trace of the engine's own profiler. The lines that profile are marked `# stepscope`. The tiny
model and the task come from `stepscope_report.demo`; a run takes a minute on a CPU. It needs vLLM and
`stepscope[cli,vllm]`.
"""

import asyncio
import random
import tempfile
from pathlib import Path

from vllm import AsyncEngineArgs, RequestOutput, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from stepscope import aprepare, capture, configure, span, trajectory, turn  # stepscope
from stepscope_report.demo import task
from stepscope_report.demo.calculator import Calculator
from stepscope_report.demo.rollout import warmed_up, write_checkpoint
from stepscope_report.demo.task import Trajectory
from stepscope_vllm import engine_args, record_request  # stepscope

STEPS, OPERATIONS = 4, (1, 1, 1, 2, 2, 3, 3, 8)
SAMPLING = SamplingParams(max_tokens=task.TURN_TOKENS, stop_token_ids=[*task.END_OF_TURN], detokenize=False)


async def generate(llm: AsyncLLM, tokens: list[int], name: str) -> RequestOutput:
    """Return the last output of a request, which holds all generated tokens."""
    outputs = [output async for output in llm.generate({"prompt_token_ids": tokens}, SAMPLING, name)]
    return outputs[-1]


async def play(name: str, problem: task.Problem, llm: AsyncLLM, calculator: Calculator) -> float:
    """Return the reward of one trajectory."""
    played, left = Trajectory(name, problem), problem
    played.hear("^" + left.text)
    with trajectory(name):  # stepscope
        for index in range(problem.max_turns):
            with turn(index) as this_turn:  # stepscope
                output = await generate(llm, played.tokens, f"{name}-{index}")
                record_request(this_turn, output)  # stepscope: its times in queue, prefill and decode
                if not (call := played.say(list(output.outputs[0].token_ids))).endswith(">"):
                    break
                with span("tool", role="env"):  # stepscope
                    left = left.after(await calculator.ask(call[1:-1]))
                played.hear(left.text)
    return task.reward(problem, played.turns)


async def main(model: Path) -> None:
    roles = {"rollout": {"ranks": "all"}}
    config = configure(save_path="outputs/vllm_agent_loop", steps=[1, 3], roles=roles)  # stepscope
    arguments = AsyncEngineArgs(
        str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        **engine_args(config, replica=0),  # stepscope: lets a capture start the engine's profiler
    )
    llm = AsyncLLM.from_engine_args(arguments)
    await aprepare(engines=[llm])  # stepscope: finds errors now
    rng = random.Random(0)
    async with Calculator() as calculator:
        for step in range(STEPS):
            problems = [task.make_problem(rng, operations) for operations in OPERATIONS]
            async with capture(step, engines=[llm]):  # stepscope
                trajectories = (play(f"{step}-{i}", p, llm, calculator) for i, p in enumerate(problems))
                rewards = await asyncio.gather(*trajectories)
            print(f"step {step}: mean reward {sum(rewards) / len(rewards):.2f}")
    llm.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), warmed_up(updates=150))
        asyncio.run(main(Path(folder)))
    print("See where the steps went: stepscope report outputs/vllm_agent_loop")
