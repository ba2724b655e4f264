"""Loss and noise of recorded training steps of the authors' code: LLaDA, and Dream with its shift by one."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from d2f.blocks import block_count, block_numbers
from d2f.distillation import distillation_loss
from tests.test_blocks import VECTORS

NOTES = {family: json.loads((VECTORS / family / "d2f-train.json").read_text()) for family in ("llada", "dream")}
CASES = [
    pytest.param(family, case, id=f"{family}-{case['case']}")
    for family, notes in NOTES.items()
    for case in notes["cases"]
]


def recorded(family: str, case: dict) -> SimpleNamespace:
    """The tensors of one recorded step."""
    tensors, prefix = load_file(VECTORS / family / "d2f-train.safetensors"), f"{case['case']}."
    found = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    found["masked"] = found["masked"].bool()
    return SimpleNamespace(**found)


@pytest.mark.parametrize(("family", "case"), CASES)
def test_losses_equal_those_of_the_authors_code(family, case):
    step, shift = recorded(family, case), NOTES[family]["shift_logits"]
    rows = step.masked.roll(-1, dims=1) if shift else step.masked
    student, teacher, ratios = step.student_logits[rows], step.teacher_logits[rows], step.p_mask[step.masked]
    labels = step.input_ids[step.masked]
    assert len(student) == case["masked_positions"]
    assert float(distillation_loss(student, teacher, ratios)) == pytest.approx(case["loss_distill"], abs=1e-5)
    assert float(distillation_loss(student, labels, ratios)) == pytest.approx(case["loss_data"], abs=1e-5)
    reverse = distillation_loss(student, teacher, ratios, "reverse")
    swapped = distillation_loss(teacher, student, ratios)
    unweighted, summed = (
        distillation_loss(student, teacher),
        distillation_loss(student, teacher, ratios, rows=len(rows)),
    )
    other = step.masked if shift else step.masked.roll(-1, dims=1)
    unshifted = distillation_loss(step.student_logits[other], step.teacher_logits[other], ratios)
    for wrong in (reverse, swapped, unweighted, summed, unshifted):  # negative controls
        assert abs(float(wrong) - case["loss_distill"]) > 0.01


@pytest.mark.parametrize(("family", "case"), CASES)
def test_recorded_noise_is_one_ratio_per_block(family, case):
    step = recorded(family, case)
    rows, length = step.input_ids.shape
    numbers = block_numbers(step.prompt_lengths, length, case["block_size"])
    blocks = block_count(step.prompt_lengths, length, case["block_size"])
    ratios = torch.zeros(rows, blocks + 1).scatter_reduce_(1, numbers, step.p_mask, "amax")
    assert torch.equal(ratios.gather(1, numbers), step.p_mask) and not ratios[:, 0].any()
    for row, last in zip(ratios, numbers.amax(dim=1).tolist(), strict=True):
        assert (row[1 : last + 1].diff() >= 0).all() and row[1] >= 0.2 and row[last] <= 0.7
        gaps = (0.7 - row[1]) / max(1, blocks - 1)  # the longest answer's blocks set the step of every row
        assert (row[1 : last + 1].diff() <= gaps + 1e-6).all()
    assert torch.equal(step.noisy_ids != step.input_ids, step.masked)
