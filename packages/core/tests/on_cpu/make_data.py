"""`python make_data.py FOLDER`: a tiny random Qwen2 with its tokenizer, and prompts in the form of verl."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas  # type: ignore[import-untyped]
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

MARKS = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]


def save_tokenizer(folder: Path) -> int:
    """Save a tokenizer of bytes, which AutoTokenizer reads as Qwen2's. Return the number of its tokens."""
    words = [*MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=MARKS[2:]
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return len(words)


def save_model(folder: Path, words: int) -> None:
    """Save a model of two layers. Its heads have 32 dimensions, the least that vLLM takes on a CPU."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    tokens = {"vocab_size": words, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = Qwen2Config(**shape, **heads, **tokens, tie_word_embeddings=False, dtype="float32")
    Qwen2ForCausalLM(config).save_pretrained(folder)


def save_prompts(folder: Path) -> None:
    """Save 64 sums as the prompts of training and validation."""
    rows = [
        {
            "data_source": "sums",
            "ability": "math",
            "prompt": [{"role": "user", "content": f"{number}+{number * 7}="}],
            "reward_model": {"style": "rule", "ground_truth": str(8 * number)},
            "extra_info": {"index": number},
        }
        for number in range(64)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows[:8]).to_parquet(folder / "test.parquet")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    save_model(target / "model", save_tokenizer(target / "model"))
    save_prompts(target)
