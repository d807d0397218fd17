"""An ordinary TRL script: nothing in it knows of any profiler.

python trl_script.py FOLDER
"""

from __future__ import annotations

import sys

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer


def save_tiny_model(path: str) -> None:
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *"0123456789+= "])}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(path)
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)


def count_ones(completions: list[str], **_: object) -> list[float]:
    return [float(completion.count("1")) for completion in completions]


def main(folder: str) -> None:
    save_tiny_model(f"{folder}/model")
    trainer = GRPOTrainer(
        model=f"{folder}/model",
        reward_funcs=count_ones,
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_generations=4,
            num_iterations=2,  # the second step trains on what the first generated
            max_completion_length=4,
            max_steps=3,
            beta=0.1,  # a reference model
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{number}+{number}="} for number in range(8)]),
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
