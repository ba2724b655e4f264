"""The masked-diffusion forward process and loss of the teacher (LLaDA, arXiv:2502.09992, section 2).

A token of the answer becomes MASK independently with its masking probability; the model predicts the
masked tokens from everything else, and each prediction is weighted. The prompt is never masked.

Two noises make up a batch. *Uniform* is LLaDA's: one t per sample, weight 1/t. *Frontier* is what a
decoder shows the model: a clean front, a masked tail, a ramp between. Under uniform noise alone a sum's
result is nearly always given away by the sentence after it, and a small model never has to compute it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class TeacherNoise:
    """Shares and weights of the two noises.

    Args:
        frontier_share: share of the batch that gets frontier noise.
        frontier_weight: loss weight on the ramp (masking probability below 1).
        tail_weight: loss weight where everything is masked.
        ramp: narrowest and widest ramp, in tokens.
        cap: largest 1/t weight of the uniform noise.
    """

    frontier_share: float = 0.5
    frontier_weight: float = 12.0
    tail_weight: float = 0.05
    ramp: tuple[float, float] = (2.0, 26.0)
    cap: float = 20.0


def uniform_noise(rows: int, length: int, cap: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """LLaDA's noise: (rows, length) masking probabilities and weights; t is stratified over the rows."""
    offset = torch.rand((), generator=generator)
    t = ((torch.arange(rows) + offset) / max(rows, 1)).clamp(min=1e-3)
    return t[:, None].expand(rows, length), (1 / t).clamp(max=cap)[:, None].expand(rows, length)


def frontier_noise(
    answer_lengths: torch.Tensor, length: int, noise: TeacherNoise, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A ramp at a random place of each answer: (rows, length) masking probabilities and weights."""
    rows = len(answer_lengths)
    centre = torch.rand(rows, 1, generator=generator) * (answer_lengths[:, None] + 8)
    low, high = noise.ramp
    width = low + (high - low) * torch.rand(rows, 1, generator=generator)
    probability = ((torch.arange(length) - centre) / width + 0.5).clamp(0.02, 1.0)
    return probability, torch.where(probability < 1, noise.frontier_weight, noise.tail_weight)


def teacher_noise(
    answer_lengths: torch.Tensor, length: int, noise: TeacherNoise, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masking probabilities and loss weights, both (B, R), of one batch."""
    front = round(len(answer_lengths) * noise.frontier_share)
    steep = frontier_noise(answer_lengths[:front], length, noise, generator)
    flat = uniform_noise(len(answer_lengths) - front, length, noise.cap, generator)
    return torch.cat([steep[0], flat[0]]), torch.cat([steep[1], flat[1]])


def mask_answers(
    ids: torch.Tensor, prompt: int, probability: torch.Tensor, mask_id: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask the answers of ``ids`` (B, P + R) by ``probability`` (B, R): the noisy ids and what was masked."""
    masked = torch.zeros_like(ids, dtype=torch.bool)
    masked[:, prompt:] = torch.rand(probability.shape, generator=generator) < probability
    return ids.masked_fill(masked, mask_id), masked


def weighted_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, rows: int, length: int
) -> torch.Tensor:
    """Sum of weight x cross-entropy over the masked tokens, divided by rows x answer length; in float32."""
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * weights).sum() / (rows * length)
