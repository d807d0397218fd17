"""A framework with engines in its process, in Ray actors and in a server. It does not use stepscope."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from typing import Any

PROMPTS = ["hello world", "hello", "world"]


class Replica:
    """A rollout worker with an engine."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.engine: Any = None

    async def launch(self, arguments: dict[str, Any]) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def generate(self, prompt: str, request: str) -> int:
        from vllm import SamplingParams

        count = 0
        sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        async for output in self.engine.generate(prompt, sampling, request):
            count = len(output.outputs[0].token_ids)
        return count

    async def shut_down(self) -> None:
        self.engine.shutdown()


class Extension:
    """The framework's own worker extension for vLLM."""

    def greet(self) -> str:
        return f"hello from rank {self.rank}"  # type: ignore[attr-defined]  # of the worker


class LocalTrainer:
    """A loop with an LLM in its own process."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments)

    def step(self) -> list[int]:
        from vllm import SamplingParams

        outputs = self.llm.generate(PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


class RayTrainer:
    """A loop with two replicas in Ray actors, numbered 3 and 2 in this order."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        import ray

        kind: Any = ray.remote(num_cpus=0)(Replica)
        self.replicas = [kind.remote(rank) for rank in (3, 2)]
        ray.get([replica.launch.remote(arguments) for replica in self.replicas])
        self.steps = 0

    async def step(self) -> list[int]:
        self.steps += 1
        calls = [
            replica.generate.remote(prompt, f"{self.steps}-{number}-{place}")
            for place, replica in enumerate(self.replicas)
            for number, prompt in enumerate(PROMPTS)
        ]
        return list(await asyncio.gather(*calls))

    def end(self) -> None:
        import ray

        ray.get([replica.shut_down.remote() for replica in self.replicas])


class ServerTrainer:
    """A loop with a server in a process of its own."""

    def __init__(self, model: str, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        words = ["--model", model, "--served-model-name", "tiny", "--max-model-len", "256", "--enforce-eager"]
        words += ["--kv-cache-memory-bytes", str(64 << 20), "--host", "127.0.0.1", "--port", str(port)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
            stdout=subprocess.DEVNULL,
        )
        while self.process.poll() is None and not self.is_up():
            time.sleep(0.5)

    def is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:
            return False

    def step(self) -> list[int]:
        return [self.complete(prompt) for prompt in PROMPTS]

    def complete(self, prompt: str) -> int:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            tokens: int = json.load(answer)["usage"]["completion_tokens"]
        return tokens

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(60)
