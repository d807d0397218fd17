"""A Llama of 0.1 M parameters, with one forward pass for training and for decoding with a KV cache.

It is an exact Llama in spite of its size, so that real inference engines can load its weights
(`llama_weights`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope_report.demo.task import MAX_TOKENS, VOCABULARY

LAYERS = 2
HEADS = 2
HEAD_DIM = 32  # the smallest that vLLM's attention on CPUs accepts
WIDTH = HEADS * HEAD_DIM
HIDDEN = 3 * WIDTH
ROPE_THETA = 1000.0
NORM_EPSILON = 1e-6


class KVCache:
    """Keys and values of up to `slots` sequences, each of shape [layers, slots, heads,
    MAX_TOKENS, head_dim].
    """

    def __init__(self, slots: int) -> None:
        shape = (LAYERS, slots, HEADS, MAX_TOKENS, HEAD_DIM)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)


class View:
    """The part of a cache that one batch continues. Row i of the batch is in slot `slots[i]`, from
    `positions[i]` on.
    """

    def __init__(self, cache: KVCache, slots: Tensor, positions: Tensor) -> None:
        self.positions = positions
        self._cache = cache
        self._slots = slots
        self._end = int(positions.max()) + 1
        self.seen = torch.arange(self._end) <= positions[:, None, :, None]
        """Attention mask of each token, of shape [batch, 1, time, end]."""

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [batch, heads, time, head_dim]. Return the keys and the values of the
        batch up to its last position, both [batch, heads, end, head_dim].
        """
        keys, values, rows = self._cache.keys[layer], self._cache.values[layer], self._slots[:, None]
        keys[rows, :, self.positions] = key.transpose(1, 2)
        values[rows, :, self.positions] = value.transpose(1, 2)
        return keys[self._slots, :, : self._end], values[self._slots, :, : self._end]


class Attention(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, positions: Tensor, cached: View | None) -> Tensor:
        batch, time, _ = x.shape
        query, key, value = self.qkv(x).view(batch, time, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        query, key = rotate(query, positions), rotate(key, positions)
        if cached is None:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            key, value = cached.update(self.layer, key, value)
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=cached.seen)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, WIDTH))
        return out


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.attention = Attention(layer)
        self.mlp = GatedMLP()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, NORM_EPSILON), nn.RMSNorm(WIDTH, NORM_EPSILON)

    def forward(self, x: Tensor, positions: Tensor, cached: View | None) -> Tensor:
        x = x + self.attention(self.norm1(x), positions, cached)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(VOCABULARY), WIDTH)
        self.blocks = nn.ModuleList(Block(layer) for layer in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, NORM_EPSILON)
        self.head = nn.Linear(WIDTH, len(VOCABULARY), bias=False)

    def forward(self, tokens: Tensor, cached: View | None = None) -> Tensor:
        """Return logits [batch, time, vocabulary] for `tokens` [batch, time], which begin or continue
        sequences.

        Padding on the right has no effect: no earlier token attends to it, and in a cache it is overwritten
        before a token attends to it.
        """
        positions = torch.arange(tokens.shape[1])[None] if cached is None else cached.positions
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions, cached)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Add the positions [batch or 1, time] to `x` [batch, heads, time, head_dim] as rotations (RoPE)."""
    half = HEAD_DIM // 2
    frequency = ROPE_THETA ** (-torch.arange(half) / half)
    angle = positions[:, None, :, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def token_log_probs(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the log-probability [batch, time - 1] of each token except the first, given the tokens before
    it.
    """
    logits: Tensor = model(tokens)[:, :-1]
    return -functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


def llama_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a `Transformer` under the names of Hugging Face's Llama."""
    renamed = {
        "model.embed_tokens.weight": weights["embed.weight"],
        "model.norm.weight": weights["norm.weight"],
        "lm_head.weight": weights["head.weight"],
    }
    for layer in range(LAYERS):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        for name, part in zip("qkv", weights[f"{ours}.attention.qkv.weight"].chunk(3), strict=True):
            renamed[f"{theirs}.self_attn.{name}_proj.weight"] = part
        renamed[f"{theirs}.self_attn.o_proj.weight"] = weights[f"{ours}.attention.out.weight"]
        for name in ("gate", "up", "down"):
            renamed[f"{theirs}.mlp.{name}_proj.weight"] = weights[f"{ours}.mlp.{name}.weight"]
        renamed[f"{theirs}.input_layernorm.weight"] = weights[f"{ours}.norm1.weight"]
        renamed[f"{theirs}.post_attention_layernorm.weight"] = weights[f"{ours}.norm2.weight"]
    return renamed


def llama_config() -> dict[str, object]:
    """Return the `config.json` for `llama_weights`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(VOCABULARY),
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }
