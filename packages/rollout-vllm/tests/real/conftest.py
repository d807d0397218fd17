"""Fixtures for tests with real engines. Each test file builds an engine of its own and shuts it down."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import stepscope_vllm
from stepscope import ProfileConfig

os.environ.update(
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # the engine shares the CPUs with the tests
)

if find_spec("vllm") is not None:
    with warnings.catch_warnings():
        # vLLM is imported before the tests, because its imports warn, and a warning is an error in a test.
        warnings.simplefilter("ignore")
        import vllm
        from vllm import LLM, AsyncEngineArgs, SamplingParams  # noqa: F401
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401
    gc.collect()
    gc.freeze()  # a collection of all 600,000 objects would block event loops for 0.4 s

SIZES: dict[str, Any] = {
    "max_model_len": 256,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
    "disable_log_stats": False,
}
"""Arguments of the engines, chosen for little memory."""


RUN_BY = {
    "test_async_llm.py": ("0.27.1", "0.32.0"),
    "test_server.py": ("0.29.0", "0.32.0"),
    "test_ray.py": ("0.32.0",),
    "test_unedited.py": ("0.27.1", "0.32.0"),
    "test_documented_loop.py": ("0.32.0",),
    "test_example.py": ("0.32.0",),
    "test_owner.py": ("0.29.0", "0.31.0"),
    "test_router.py": ("0.32.0",),
    "test_wheels.py": ("0.31.0",),
    "test_why_engine.py": ("0.32.0",),
    "test_passes.py": ("0.27.1", "0.32.0"),
    "test_vllm_more.py": (),  # run on request, in an environment of its own, like the next file
    "test_vllm_more_passes.py": (),
}
"""{test file that takes a minute: the versions of vLLM that run it}. Other files run on every version."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path.name in _left_out() else None


def pytest_report_header() -> str | None:
    return f"left to other versions of vLLM: {', '.join(_left_out())}" if _left_out() else None


def _left_out() -> list[str]:
    """Return the test files that this version of vLLM does not run. A version that is in no recipe runs all
    files, because it was installed by hand to be tested.
    """
    if find_spec("vllm") is None:
        return []
    release = vllm.__version__.partition("+")[0]
    tried = {version for versions in RUN_BY.values() for version in versions} | {"0.31.0"}
    return [name for name, versions in RUN_BY.items() if release in tried and release not in versions]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # vLLM and its dependencies warn, and their warnings must not fail a test.
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def expert_model(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a mixture of four experts, two for each token, with the tokenizer of `model`."""
    import torch
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    folder = tmp_path_factory.mktemp("experts")
    for path in Path(model).glob("token*"):
        shutil.copy(path, folder)
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        dtype="bfloat16",
    )
    Qwen2MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def sizes() -> dict[str, Any]:
    return SIZES


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def config(run_folder: Path) -> ProfileConfig:
    """Return the configuration of the run for which the engine of a file is built. Only the engine is
    profiled, because an LLM may be in this process, which can have only one torch.profiler.
    """
    return ProfileConfig(save_path=run_folder, steps="0:1000", roles={"rollout": {"ranks": "all"}})


@pytest.fixture(scope="module")
def make_llm(model: str) -> Iterator[Callable[..., Any]]:
    """Provide `make_llm(**arguments)`, which returns an LLM whose worker is in this process."""
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    yield lambda **arguments: LLM(model=model, **SIZES, **arguments)
    patch.undo()


@pytest.fixture(scope="module")
def serve(
    model: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[ProfileConfig, int], AbstractContextManager[Served]]:
    """Return `serve`: `with serve(config, replica) as served` runs a vLLM server for that replica."""

    @contextmanager
    def serving(config: ProfileConfig, replica: int) -> Iterator[Served]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = ["--model", model, "--served-model-name", "tiny", "--max-model-len", "256", "--enforce-eager"]
        words += ["--kv-cache-memory-bytes", str(64 << 20), "--api-key", "secret"]
        words += ["--host", "127.0.0.1", "--port", str(port)]
        arguments = stepscope_vllm.server_args(config, replica)
        profiler = json.loads(arguments[arguments.index("--profiler-config") + 1])
        log = tmp_path_factory.mktemp("server") / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        served = Served(f"http://127.0.0.1:{port}", Path(profiler["torch_profiler_dir"]), process)
        try:
            _wait_until_healthy(served.url, process, log)
            yield served
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    return serving


@pytest.fixture(scope="session")
def route(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[str]]:
    """Return `route`: `with route(urls, *words) as url` runs vLLM's router in front of servers."""

    @contextmanager
    def routing(urls: list[str], *words: str) -> Iterator[str]:
        ports = []
        for _ in range(2):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                ports.append(str(free.getsockname()[1]))
        place = ["--host", "127.0.0.1", "--port", ports[0], "--prometheus-port", ports[1]]
        workers = ["--policy", "round_robin", "--worker-urls", *urls]
        log = tmp_path_factory.mktemp("router") / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "vllm_router.launch_router", *place, *workers, *words],
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        url = f"http://127.0.0.1:{ports[0]}"
        try:
            _wait_until_healthy(url, process, log)
            yield url
        finally:
            process.terminate()
            process.wait(30)

    return routing


class Served(NamedTuple):
    url: str
    folder: Path
    process: subprocess.Popen[bytes]

    def complete(self, tokens: int = 4) -> None:
        body = {"model": "tiny", "prompt": "hello world", "max_tokens": tokens, "ignore_eos": True}
        self.post("/v1/completions", body, key="secret")

    def post(self, path: str, body: object = None, key: str | None = None) -> int:
        data = b"" if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method="POST")
        with urllib.request.urlopen(request, timeout=120) as answer:
            return int(answer.status)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 280
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"the server did not come up:\n{log.read_text()[-3000:]}")


def write_model(folder: Path) -> Path:
    """Write a Llama of random weights, 2 layers and 64 wide, with a tokenizer of bytes, for Hugging Face."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    specials = ["<unk>", "<s>", "</s>", "<pad>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's attention on CPUs does not support 16
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
