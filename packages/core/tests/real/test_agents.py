"""Agents of OpenRLHF and SkyRL around a toy policy: the trajectories, turns and tools of the presets."""

from __future__ import annotations

import asyncio
import importlib
import sys
import typing
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import loguru  # SkyRL's, and in this environment alone
import msgspec
import pytest
import torch
import typing_extensions

from packages.core.tests.released_frameworks import released
from stepscope import ProfileConfig, capture, configure
from stepscope._recording.capture import configure as run
from stepscope._recording.instrument import configured, step_boundaries
from stepscope.files.spans import Line, Span
from stepscope_report import step_report
from stepscope_report.timeline.load import load_step

assert loguru.logger
pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide the folder of a run, and restore what a preset replaced."""
    monkeypatch.setattr(run, "_configured", None)
    yield tmp_path / "run"
    configured.apply(ProfileConfig())


def instrument(folder: Path, preset: str) -> None:
    configure(save_path=folder, steps="every:1", roles={"*": {"profiler": "off"}}, instrument=[preset])


def spans_of(folder: Path) -> list[Span]:
    decoder = msgspec.json.Decoder(Line)
    files = [path.read_bytes() for path in folder.glob("step_*/spans/*.jsonl")]
    lines = [line for file in files for line in decoder.decode_lines(file)]
    return sorted((line for line in lines if isinstance(line, Span)), key=lambda line: line.start_ns)


def of(spans: list[Span], stage: str) -> list[Span]:
    return [span for span in spans if span.stage == stage]


class Tokenizer:
    """One token for each character."""

    eos_token, eos_token_id = "\0", 0

    def __call__(self, text: str, **options: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([self.encode(text)])}

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(map(chr, ids))

    def batch_decode(self, batch: list[list[int]]) -> list[str]:
        return [self.decode(ids) for ids in batch]

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        return self.encode("".join(f"{message['content']}\0" for message in messages))


# OpenRLHF.


class Engine:
    """A toy AsyncLLM, which answers everything with three tokens."""

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        answer = SimpleNamespace(token_ids=[97, 98, 99], text="abc", finish_reason="stop", logprobs=None)
        yield SimpleNamespace(outputs=[answer])


@pytest.fixture
def rollout_actor(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Provide OpenRLHF's rollout actor without Ray, instrumented; vLLM is a stand-in."""
    # Alone: beside it in the wheel is a package `tests`.
    (tmp_path / "openrlhf").symlink_to(released("openrlhf", "0.11.2") / "openrlhf")
    monkeypatch.syspath_prepend(tmp_path)
    content: dict[str, dict[str, object]] = {
        "": {},
        ".inputs": {"TokensPrompt": dict},
        ".utils": {"random_uuid": lambda: "id"},
    }
    for name, names in content.items():
        module = ModuleType(f"vllm{name}")
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, f"vllm{name}", module)
    instrument(folder, "openrlhf")
    engine = importlib.import_module("openrlhf.trainer.ray.vllm_engine")
    cls = engine.RolloutRayActor.__ray_metadata__.modified_class
    actor = cls.__new__(cls)
    actor.llm, actor._mm_pad_token_ids = Engine(), None
    return actor


def respond(actor: Any, samples: int) -> Any:
    options = {"max_length": 64, "hf_tokenizer": Tokenizer(), "num_samples": samples}
    params = SimpleNamespace(logprobs=None, max_tokens=8)
    with capture(0):
        return asyncio.run(actor.generate_responses(prompt="q", label="a", sampling_params=params, **options))


def test_openrlhf_agents_are_trajectories_with_turns(rollout_actor: Any, folder: Path) -> None:
    from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

    class Twice(AgentInstanceBase):  # type: ignore[misc]  # OpenRLHF is untyped
        def __init__(self) -> None:
            self.steps = 0

        async def step(self, state_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
            self.steps += 1
            done = self.steps == 2
            return {"rewards": torch.tensor(0.5), "environment_feedback": "again", "done": done}

    rollout_actor.executor = MultiTurnAgentExecutor(Twice)
    responses = respond(rollout_actor, samples=2)
    spans = spans_of(folder)
    trajectories = of(spans, "trajectory")
    assert [(span.attrs or {})["reward"] for span in trajectories] == [r["reward"] for r in responses]
    for trajectory in trajectories:
        turns = [span for span in of(spans, "turn") if span.trajectory == trajectory.trajectory]
        assert [(turn.turn, (turn.attrs or {})["output_tokens"]) for turn in turns] == [(0, 3), (1, 3)]
    assert [(span.role, span.stage) for span in spans].count(("rollout", "generate")) == 4


def test_openrlhf_single_turns_are_trajectories_of_one_turn(rollout_actor: Any, folder: Path) -> None:
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    rollout_actor.executor = SingleTurnAgentExecutor()
    respond(rollout_actor, samples=1)
    spans = spans_of(folder)
    assert [span.stage for span in spans] == ["trajectory", "turn", "generate"]
    assert len({span.trajectory for span in spans}) == 1


# SkyRL, which asks for Python 3.12: one of its classes has a TypedDict of `typing` in it.


@pytest.fixture
def skyrl(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put SkyRL's released source on the path, and instrument it."""
    source = released("skyrl", "0.4.0")
    monkeypatch.syspath_prepend(source / "skyrl-gym")
    monkeypatch.syspath_prepend(source)
    monkeypatch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
    instrument(folder, "skyrl")


def generator(version: int) -> Any:
    """Return SkyRL's generator with an environment that runs Python, and a client that asks no server."""
    import skyrl_gym
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.train.config import GeneratorConfig, SkyRLGymConfig
    from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
    from skyrl_gym.envs.base_text_env import BaseTextEnv
    from skyrl_gym.tools import PythonCodeExecutorToolGroup

    class Calculator(BaseTextEnv):  # type: ignore[misc]  # SkyRL is untyped
        def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
            super().__init__()
            self.init_tool_groups([PythonCodeExecutorToolGroup()])

        def step(self, action: str) -> dict[str, Any]:
            self.turns += 1
            result = self._execute_tool("PythonCodeExecutorToolGroup", "python", ["print(1 + 1)"])
            seen = [{"role": "user", "content": result}] if self.turns < 2 else []
            return {"observations": seen, "reward": 1.0, "done": self.turns == 2, "metadata": {}}

    class Client(RemoteInferenceClient):  # type: ignore[misc]  # as above
        async def _generate_single(self, **request: Any) -> dict[str, Any]:
            names = ("response_logprobs", "routed_experts", "rollout_sample_support")
            return {"stop_reason": "stop", "response_ids": [97, 98, 99], **dict.fromkeys(names)}

        async def finish_session(self, session_id: str) -> None:
            pass

    if "calculator" not in skyrl_gym.envs.registration.registry:
        skyrl_gym.register("calculator", entry_point=Calculator)
    urls = {"proxy_url": "http://none", "server_urls": ["http://none"]}
    client = Client(**urls, data_parallel_size=1, tokenizer=Tokenizer())
    for _ in range(version):
        client.increment_weight_version()
    return SkyRLGymGenerator(
        GeneratorConfig(max_turns=2, max_input_length=4096), SkyRLGymConfig(), client, Tokenizer()
    )


def batch(samples: int, phase: str) -> dict[str, Any]:
    from skyrl.train.generators.base import BatchMetadata, TrajectoryID

    return {
        "prompts": [[{"role": "user", "content": "1 + 1?"}]] * samples,
        "env_classes": ["calculator"] * samples,
        "env_extras": [{} for _ in range(samples)],
        "sampling_params": None,
        "trajectory_ids": [TrajectoryID("q1", number) for number in range(samples)],
        "batch_metadata": BatchMetadata(global_step=1, training_phase=phase),
    }


@pytest.mark.usefixtures("skyrl")
def test_skyrl_agents_are_trajectories_with_turns_environment_steps_and_tools(folder: Path) -> None:
    agents = generator(version=4)
    with capture(0):
        asyncio.run(agents.generate(batch(2, "train"), disable_tqdm=True))
    spans = spans_of(folder)
    assert {(span.trajectory, span.policy_version) for span in of(spans, "trajectory")} == {
        ("q1_0", 4),
        ("q1_1", 4),
    }
    turns = [(span.trajectory, span.turn, (span.attrs or {})["output_tokens"]) for span in of(spans, "turn")]
    assert sorted(turns) == [("q1_0", 0, 3), ("q1_0", 1, 3), ("q1_1", 0, 3), ("q1_1", 1, 3)]
    steps = of(spans, "Calculator")
    assert {(span.role, span.trajectory) for span in steps} == {("env", "q1_0"), ("env", "q1_1")}
    assert (len(steps), len(of(spans, "python")), len(of(spans, "generate"))) == (4, 4, 1)
    assert all(float((span.attrs or {})["env_s"] or 0) > 0 for span in of(spans, "trajectory"))


@pytest.mark.usefixtures("skyrl")
def test_skyrl_evaluation_is_no_trajectory(folder: Path) -> None:
    agents = generator(version=1)
    with capture(0):
        asyncio.run(agents.generate(batch(1, "eval"), disable_tqdm=True))
    assert of(spans_of(folder), "trajectory") == []


@pytest.mark.usefixtures("skyrl")
def test_skyrls_asynchronous_trainer_takes_samples_of_earlier_versions(folder: Path) -> None:
    from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer, GeneratedOutputGroup

    trainer = object.__new__(FullyAsyncRayPPOTrainer)
    trainer._phase_gauge = SimpleNamespace(timed_phase=lambda *names: nullcontext())
    trainer.all_metrics, trainer.all_timings = {}, {}
    trainer.mini_batch_size, trainer.sample_full_batch = 2, False

    async def loop() -> None:
        for trainer.global_step in (5, 6):
            buffer: asyncio.Queue[Any] = asyncio.Queue()
            for uid, age in (("old", 2), ("new", 0)):
                buffer.put_nowait(GeneratedOutputGroup({}, uid, trainer.global_step - age))
            await trainer._collect_generation_mini_batch(buffer, asyncio.Event())

    asyncio.run(loop())
    step_boundaries.switch(step_boundaries._finish(None))
    assert sorted(path.name for path in folder.glob("step_*")) == ["step_000005", "step_000006"]
    staleness = step_report(load_step(folder / "step_000006")).staleness
    assert staleness is not None
    assert (staleness.policy_version, staleness.trajectories) == (6, 2)
    assert [(row.trajectory, row.versions) for row in staleness.worst] == [("old", 2)]
