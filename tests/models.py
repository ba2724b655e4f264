"""Tiny random models, sharp enough to decode.

transformers initialises weights so small that every prediction is a near tie. These are drawn large, so
that confidences spread over 0..1 and depend on position and context, and norms and biases are drawn too,
so that forgetting one of them shows.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from backbone.network import Network

VOCABULARY, MASK, END = 24, 1, 0


def tiny_module(
    kind: str = "llama",
    *,
    seed: int = 0,
    kv_heads: int = 2,
    tied: bool = False,
    positions: int = 96,
    spread: float = 0.35,
) -> torch.nn.Module:
    """A random ``LlamaForCausalLM`` or ``Qwen2ForCausalLM`` (biases on q, k, v) of two layers, width 32."""
    config_type, model_type = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[kind]
    config = config_type(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
        attn_implementation="sdpa",
    )
    module = model_type(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim == 2:
            weight.data = noise * spread
        else:
            weight.data = (0.0 if name.endswith("bias") else 1.0) + 0.3 * noise
    return module


def tiny_network(
    kind: str = "llama", *, shift: bool = False, forward: str = "lean", end_ids=(END,), mask_id=MASK, **options
) -> Network:
    """A random network; a diffusion one unless ``mask_id`` is None."""
    return Network(tiny_module(kind, **options), mask_id=mask_id, end_ids=end_ids, shift=shift, forward=forward)


def random_prompt(length: int, seed: int) -> torch.Tensor:
    """(length,) tokens, neither MASK nor END."""
    return torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def module_logits(module: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(L, V) logits of one row through transformers' own forward, without a cache; ``mask`` (L, L) additive."""
    with torch.no_grad():
        return module(input_ids=ids[None], attention_mask=mask[None, None], use_cache=False).logits[0]
