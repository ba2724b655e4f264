"""Asymmetric distillation (D2F, arXiv:2508.09192, section 4.2).

Teacher and student read the *same* noisy answer; the teacher sees all of it, the student only what its
block may see. The student learns the teacher's distributions at the masked positions, nothing else: no
label enters the loss. So it learns to predict a block from earlier blocks that are still noisy, as the
pipelined decoder will ask it to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from backbone.diffusion import mask_answers
from backbone.examples import Examples
from backbone.pretraining import everything_visible, predict_masked
from backbone.selection import check_choice
from backbone.training import Loss
from d2f.blocks import additive_visibility, block_numbers
from d2f.noise import SCHEDULES, block_ratios

WEIGHTINGS = ("inverse_ratio", "none")


@dataclass(frozen=True)
class DistillationSettings:
    """What the student is trained on.

    Args:
        schedule: block noise, see :mod:`d2f.noise`.
        ratios: lowest and highest mask ratio of ``monotone`` and ``random``.
        block_sizes: a batch draws one of these; a student trained on a single size decodes badly at others.
        weighting: ``inverse_ratio`` divides a token's loss by its block's mask ratio (the authors' code).
    """

    schedule: str = "steep"
    ratios: tuple[float, float] = (0.2, 0.7)
    block_sizes: tuple[int, ...] = (8, 16, 32)
    weighting: str = "none"

    def __post_init__(self) -> None:
        check_choice("distillation.schedule", self.schedule, SCHEDULES)
        check_choice("distillation.weighting", self.weighting, WEIGHTINGS)
        low, high = self.ratios
        if not 0 < low <= high <= 1:
            raise ValueError(
                f"distillation.ratios is [{low}, {high}]: give [lowest, highest] with 0 < lowest <= highest <= 1"
            )
        if not self.block_sizes or min(self.block_sizes) < 1:
            raise ValueError(f"distillation.block_sizes is {list(self.block_sizes)}: give whole numbers of at least 1")


def distillation_loss(student: torch.Tensor, teacher: torch.Tensor, ratios: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over masked positions of the soft cross-entropy H(teacher, student), in float32.

    Its gradient is that of forward KL(teacher || student); the value carries the teacher's entropy.

    Args:
        student, teacher: logits (M, V) at the same masked positions.
        ratios: (M,) mask ratio of each position's block, to divide by; None to weight all alike.

    Returns:
        A scalar; zero, with gradient, when nothing was masked.
    """
    if len(student) == 0:
        return student.float().sum()
    losses = -(torch.softmax(teacher.float(), -1) * F.log_softmax(student.float(), -1)).sum(-1)  # (M,)
    return (losses if ratios is None else losses / ratios).mean()


def student_loss(
    examples: Examples,
    batch_size: int,
    teacher: torch.nn.Module,
    mask_id: int,
    settings: DistillationSettings,
    shift: bool = False,
) -> Loss:
    """The loss of one distillation step; ``teacher`` is frozen and sees everything."""

    def loss(model, step, generator):
        batch = examples.batch(batch_size, generator)
        sizes = settings.block_sizes
        size = sizes[int(torch.randint(len(sizes), (), generator=generator))]
        rows, length = batch.ids.shape
        numbers = block_numbers(batch.prompt, length, size)[batch.prompt :] - 1  # (R,) from 0
        answered = torch.ceil(batch.answer_lengths / size)
        low, high = settings.ratios
        ratios = block_ratios(settings.schedule, rows, int(numbers[-1]) + 1, answered, low, high, generator)[:, numbers]
        noisy, masked = mask_answers(batch.ids, batch.prompt, ratios, mask_id, generator)
        noisy = noisy.to(model.device)
        blocks = additive_visibility(batch.prompt, length, size, device=model.device, dtype=model.dtype)[None, None]
        student_logits = predict_masked(model, noisy, masked, blocks, shift)
        with torch.no_grad():
            teacher_logits = predict_masked(teacher, noisy, masked, everything_visible(noisy, teacher), shift)
        weights = ratios[masked[:, batch.prompt :]].to(model.device) if settings.weighting == "inverse_ratio" else None
        return distillation_loss(student_logits, teacher_logits, weights), batch.ids.numel()

    return loss
