"""Pretraining for studies that cannot download their models: an AR model, and a diffusion teacher of
the same size that starts from the AR model's weights.

Both are native transformers Llama models. The teacher sees everything (no causal mask); it predicts a
masked token at the token's own position, as LLaDA does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from backbone.diffusion import TeacherNoise, mask_answers, teacher_noise, weighted_cross_entropy
from backbone.examples import Examples
from backbone.training import Loss


@dataclass(frozen=True)
class Shape:
    """Size of a small Llama model; names as in transformers' config."""

    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    intermediate_size: int = 384
    positions: int = 512


def new_model(shape: Shape, tokenizer, seed: int) -> torch.nn.Module:
    """A Llama model with tied embeddings and random weights, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        use_cache=False,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def autoregressive_loss(examples: Examples, batch_size: int) -> Loss:
    """Next-token cross-entropy on the answers, up to their first end token."""

    def loss(model, step, generator):
        batch = examples.batch(batch_size, generator)
        lengths = batch.answer_lengths
        end = batch.prompt + int(lengths.max())
        ids = batch.ids[:, :end].to(model.device)
        hidden = model.model(ids[:, :-1]).last_hidden_state[:, batch.prompt - 1 :]  # (B, longest, d)
        wanted = torch.arange(int(lengths.max())) < lengths[:, None]
        targets = ids[:, batch.prompt :][wanted]
        return F.cross_entropy(model.lm_head(hidden[wanted]).float(), targets), ids.numel()

    return loss


def teacher_loss(examples: Examples, batch_size: int, mask_id: int, noise: TeacherNoise) -> Loss:
    """The masked-diffusion loss under full attention; end-token padding counts as text."""

    def loss(model, step, generator):
        batch = examples.batch(batch_size, generator)
        rows, length = len(batch.ids), batch.ids.shape[1] - batch.prompt
        probability, weights = teacher_noise(batch.answer_lengths, length, noise, generator)
        noisy, masked = mask_answers(batch.ids, batch.prompt, probability, mask_id, generator)
        logits = predict_masked(model, noisy.to(model.device), masked, everything_visible(noisy, model))
        chosen = masked[:, batch.prompt :]
        return weighted_cross_entropy(logits, batch.ids[masked], weights[chosen], rows, length), batch.ids.numel()

    return loss


def everything_visible(ids: torch.Tensor, model) -> torch.Tensor:
    """(1, 1, L, L) additive mask of zeros: without a mask, transformers would be causal."""
    length = ids.shape[1]
    return torch.zeros(1, 1, length, length, device=model.device, dtype=model.dtype)


def predict_masked(
    model, noisy: torch.Tensor, masked: torch.Tensor, visibility: torch.Tensor, shift: bool = False
) -> torch.Tensor:
    """Logits (M, V) of the masked positions only, so that the head never sees the rest.

    With ``shift`` a position is predicted by the row before it (Dream).
    """
    hidden = model.model(noisy, attention_mask=visibility).last_hidden_state
    rows = masked.roll(-1, dims=1) if shift else masked
    return model.lm_head(hidden[rows])
