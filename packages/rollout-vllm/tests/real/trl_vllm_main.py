"""An ordinary TRL script whose vLLM runs in the trainer's process. It does not use a profiler.

python trl_vllm_main.py FOLDER
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import torch
import vllm.model_executor.layers.utils as layers
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from examples.trl_grpo import count_ones, save_tokenizer


def keep_weights(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Keep a layer's weights unpacked. On CPUs, vLLM would drop the weights that an update writes to."""
    vars(layer)["cpu_linear"] = torch.nn.functional.linear


layers.dispatch_cpu_unquantized_gemm = keep_weights


def save_model(path: str) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=save_tokenizer(path),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)


def main(folder: str) -> None:
    save_model(f"{folder}/model")
    args = GRPOConfig(
        f"{folder}/out",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4,
        max_steps=3,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=64,
    )
    prompts = Dataset.from_list([{"prompt": f"{number}+{number}="} for number in range(8)])
    trainer = GRPOTrainer(model=f"{folder}/model", reward_funcs=count_ones, args=args, train_dataset=prompts)
    trainer.train()
    weights = b"".join(p.detach().numpy().tobytes() for p in trainer.model.state_dict().values())
    Path(folder, "grpo.sha256").write_text(hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    main(sys.argv[1])
