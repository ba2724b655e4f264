"""Asymmetric distillation (D2F, arXiv:2508.09192, section 4.2).

Teacher and student read the *same* noisy answer; the teacher sees all of it, the student only what its
block may see. The student learns the teacher's distributions at the masked positions, nothing else: no
label enters the loss. So it learns to predict a block from earlier blocks that are still noisy, as the
pipelined decoder will ask it to.

The paper and its code write down different losses; ``MODES`` names both. Eq. 3 is KL(student || teacher)
summed over the blocks, which pulls the student into the teacher's likeliest answers. The code takes the
cross-entropy against the teacher, hence KL(teacher || student), which makes it cover them all, and divides
by the block's mask ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from backbone.diffusion import mask_answers
from backbone.examples import Batch, Examples
from backbone.pretraining import everything_visible, predict_masked
from backbone.selection import check_choice
from backbone.training import Loss
from d2f.blocks import additive_visibility, block_count, block_numbers
from d2f.noise import SCHEDULES, block_ratios

CHOICES = {
    "schedule": SCHEDULES,
    "weighting": ("inverse_ratio", "none"),
    "divergence": ("forward", "reverse"),
    "normalisation": ("masked", "rows"),
    "target": ("teacher", "data"),
}
MODES = {
    "code": {
        "schedule": "monotone",
        "ratios": (0.2, 0.7),
        "block_sizes": (16,),
        "weighting": "inverse_ratio",
        "divergence": "forward",
        "normalisation": "masked",
    },
    "paper": {
        "schedule": "increasing",
        "ratios": (0.3, 0.7),
        "block_sizes": (16,),
        "weighting": "none",
        "divergence": "reverse",
        "normalisation": "rows",
    },
}  # the settings of either, as a study writes them


@dataclass(frozen=True)
class DistillationSettings:
    """What the student is trained on.

    Args:
        schedule: block noise, see :mod:`d2f.noise`.
        ratios: lowest and highest mask ratio of every schedule but ``steep``.
        block_sizes: a batch draws one of these; a student trained on a single size decodes badly at others.
        weighting: ``inverse_ratio`` divides a token's loss by its block's mask ratio (the authors' code).
        divergence: ``forward`` is KL(teacher || student) (code), ``reverse`` KL(student || teacher) (paper, Eq. 3).
        normalisation: the sum over masked tokens is divided by their number (``masked``, code) or by the number of
            ``rows``: a block's tokens are predicted independently, so their KLs add up to the block's, and the
            blocks' to Eq. 3's.
        target: ``teacher``, or ``data``: cross-entropy against the true tokens, without a teacher (a control).

    Raises:
        ValueError: a value out of range, or the reverse divergence of labels; one line.
    """

    schedule: str = "steep"
    ratios: tuple[float, float] = (0.2, 0.7)
    block_sizes: tuple[int, ...] = (8, 16, 32)
    weighting: str = "none"
    divergence: str = "forward"
    normalisation: str = "masked"
    target: str = "teacher"

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            check_choice(f"distillation.{name}", getattr(self, name), allowed)
        low, high = self.ratios
        if not 0 < low <= high <= 1:
            raise ValueError(
                f"distillation.ratios is [{low}, {high}]: give [lowest, highest] with 0 < lowest <= highest <= 1"
            )
        if not self.block_sizes or min(self.block_sizes) < 1:
            raise ValueError(f"distillation.block_sizes is {list(self.block_sizes)}: give whole numbers of at least 1")
        if self.target == "data" and self.divergence == "reverse":
            raise ValueError("distillation.target is data, whose reverse KL is infinite: set divergence to forward")


def kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """(M,) KL(first || second) of logits (M, V), in float32; 0 for equal ones at any vocabulary.

    KL(teacher, student) is :func:`distillation_loss` without the teacher's entropy, its floor.
    """
    log_p, log_q = F.log_softmax(first.float(), -1), F.log_softmax(second.float(), -1)
    p, q = log_p.exp(), log_q.exp()
    # p and q both sum to 1; subtracting them leaves no negative term and cancels the normalisers' rounding
    return (p * (log_p - log_q) - p + q).sum(-1)


def token_losses(student: torch.Tensor, target: torch.Tensor, divergence: str = "forward") -> torch.Tensor:
    """(M,) loss of each masked position, in float32; arguments as in :func:`distillation_loss`."""
    if target.ndim == 1:
        return F.cross_entropy(student.float(), target, reduction="none")
    if divergence == "reverse":
        return kl(student, target)
    return -(torch.softmax(target.float(), -1) * F.log_softmax(student.float(), -1)).sum(-1)


def distillation_loss(
    student: torch.Tensor,
    target: torch.Tensor,
    ratios: torch.Tensor | None = None,
    divergence: str = "forward",
    rows: int | None = None,
) -> torch.Tensor:
    """Mean over masked positions of the soft cross-entropy H(teacher, student), in float32.

    Its gradient is that of forward KL(teacher || student); the value carries the teacher's entropy.

    Args:
        student: logits (M, V) at the masked positions.
        target: the teacher's logits (M, V) at the same positions, or the true tokens (M,) int64.
        ratios: (M,) mask ratio of each position's block, to divide by; None to weight all alike.
        divergence: ``reverse`` for KL(student || teacher) instead.
        rows: divide the sum by this instead of M.

    Returns:
        A scalar; zero, with gradient, when nothing was masked.
    """
    if len(student) == 0:
        return student.float().sum()
    losses = token_losses(student, target, divergence)
    losses = losses if ratios is None else losses / ratios
    return losses.mean() if rows is None else losses.sum() / rows


def answer_ratios(
    batch: Batch, block_size: int, settings: DistillationSettings, generator: torch.Generator
) -> torch.Tensor:
    """(B, R) mask ratio of each answer position: that of its block."""
    rows, length = batch.ids.shape
    numbers = block_numbers(batch.prompt, length, block_size)[batch.prompt :] - 1  # (R,) from 0
    blocks = block_count(batch.prompt, length, block_size)
    answered = torch.ceil(batch.answer_lengths / block_size)
    return block_ratios(settings.schedule, rows, blocks, answered, *settings.ratios, generator)[:, numbers]


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
        ratios = answer_ratios(batch, size, settings, generator)
        noisy, masked = mask_answers(batch.ids, batch.prompt, ratios, mask_id, generator)
        noisy, (rows, length) = noisy.to(model.device), noisy.shape
        blocks = additive_visibility(batch.prompt, length, size, device=model.device, dtype=model.dtype)[None, None]
        student_logits = predict_masked(model, noisy, masked, blocks, shift)
        if settings.target == "data":
            target = batch.ids[masked].to(model.device)
        else:
            with torch.no_grad():
                target = predict_masked(teacher, noisy, masked, everything_visible(noisy, teacher), shift)
        weights = ratios[masked[:, batch.prompt :]].to(model.device) if settings.weighting == "inverse_ratio" else None
        divisor = rows if settings.normalisation == "rows" else None
        return distillation_loss(student_logits, target, weights, settings.divergence, divisor), batch.ids.numel()

    return loss
