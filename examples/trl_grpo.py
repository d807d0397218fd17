"""GRPO with TRL on a toy model. This script does not import stepscope. One line profiles it:

stepscope run --preset trl --steps 0,2 --save-path outputs/trl_grpo examples/trl_grpo.py
stepscope report outputs/trl_grpo
"""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

PROMPTS = [{"prompt": f"{number}+{number}="} for number in range(8)] * 4


def count_ones(completions: list[str], **_: object) -> list[float]:
    """Return the rewards of completions."""
    return [float(completion.count("1")) for completion in completions]


def save_tokenizer(folder: str) -> int:
    """Save a tokenizer for digits, and return the size of its vocabulary."""
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *"0123456789+= "])}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return len(words)


def save_model(folder: str) -> None:
    """Save a Qwen2 with one layer, in place of a downloaded model."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=save_tokenizer(folder),
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
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_trainer(model: str, output: str) -> GRPOTrainer:
    args = GRPOConfig(
        output,
        max_steps=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        num_iterations=2,  # the second step trains on what the first one generated
        max_completion_length=4,
        beta=0.1,  # above 0, TRL needs a reference model
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
    )
    prompts = Dataset.from_list(PROMPTS)
    return GRPOTrainer(model=model, reward_funcs=count_ones, args=args, train_dataset=prompts)


if __name__ == "__main__":
    save_model("outputs/trl_grpo_model")
    make_trainer("outputs/trl_grpo_model", "outputs/trl_grpo_checkpoints").train()
