"""A tiny random model, and the settings with which SGLang serves it on a CPU without SGLang's kernels."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import resource
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from stepscope_sglang._versions import installed, older

T = TypeVar("T")
_KNOWS_ALL = "0.5.23"
"""Release whose engine has every argument in `settings`. For this release, sglang is not imported to find out
which arguments it has, because the import takes 10 s."""
_MEMORY = 16 << 30
"""Limit of the address space in bytes."""

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

# The model is a GPT-2, because its positions are learned. Rotary positions need a kernel.
MODEL = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 512,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 1,
    "n_inner": 128,
    "n_positions": 2048,
    "n_ctx": 2048,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}

SPLIT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 512,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
"""An OPT, which has learned positions too. Unlike SGLang's GPT-2, it can be split over tensor and pipeline
ranks."""


def limit_memory() -> None:
    """Limit the memory of this process and its children, because an engine that polls while it is recorded
    takes gigabytes.
    """
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))


def write_model(folder: Path, model: Mapping[str, object] = MODEL) -> Path:
    """Write the model's configuration. SGLang makes random weights (`load_format="dummy"`)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model))
    return folder


def settings(model: Path, **changes: object) -> dict[str, Any]:
    """Return arguments for `sglang.Engine`, without those that this version does not have."""
    wanted: dict[str, object] = {
        "model_path": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "disable_radix_cache": True,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "context_length": 1024,
        "log_level": "error",
        "random_seed": 0,
        "enable_metrics": True,
        "sleep_on_idle": True,  # a recording of an idle scheduler that polls takes gigabytes in seconds
        **changes,
    }
    if not older(installed(), _KNOWS_ALL):
        return wanted
    from sglang.srt.server_args import ServerArgs

    fields = getattr(ServerArgs, "__struct_fields__", None)
    known = set(fields) if fields is not None else {field.name for field in dataclasses.fields(ServerArgs)}
    return {name: value for name, value in wanted.items() if name in known}


async def generate(engine: Any, requests: int = 2, tokens: int = 4) -> list[dict[str, Any]]:
    """Run `requests` requests at once: one or a few prefill passes, then `tokens` - 1 decode passes."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    prompts = [[1 + (number + place) % 500 for place in range(8)] for number in range(requests)]
    answers = [engine.async_generate(input_ids=prompt, sampling_params=sampling) for prompt in prompts]
    return list(await asyncio.gather(*answers))


def on_its_loop(engine: Any, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on the engine's own loop, as the engine's synchronous methods do."""
    result: T = engine.loop.run_until_complete(work)
    return result
