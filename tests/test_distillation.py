"""The distillation loss against its formula, and who sees what while the student learns."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from backbone.examples import Batch
from backbone.pretraining import everything_visible, predict_masked
from backbone.settings import build
from backbone.training import step_generator
from d2f.blocks import additive_visibility
from d2f.distillation import MODES, DistillationSettings, distillation_loss, kl, student_loss
from tests.models import END, MASK, VOCABULARY, random_prompt, tiny_module
from tests.test_blocks import slow_visibility

PROMPT, ANSWER = 5, 19


def logits(count: int, seed: int) -> torch.Tensor:
    return 2 * torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def slow_loss(student: torch.Tensor, teacher: torch.Tensor, ratios: list[float] | None) -> float:
    """(1 / M) sum_m [ - sum_v q_m(v) log s_m(v) ] / p_m, in Python floats."""

    def softmax(row):
        peak = max(row)
        powers = [math.exp(value - peak) for value in row]
        return [power / sum(powers) for power in powers]

    total = 0.0
    for m, (s, t) in enumerate(zip(student.tolist(), teacher.tolist(), strict=True)):
        entropy = -sum(q * math.log(p) for q, p in zip(softmax(t), softmax(s), strict=True))
        total += entropy / (ratios[m] if ratios else 1.0)
    return total / len(student)


@pytest.mark.parametrize("weighted", [False, True])
def test_loss_equals_the_formula(weighted):
    student, teacher = logits(7, 0), logits(7, 1)
    ratios = [0.2, 0.25, 0.3, 0.5, 0.7, 1.0, 0.9] if weighted else None
    got = distillation_loss(student, teacher, torch.tensor(ratios) if ratios else None)
    assert float(got) == pytest.approx(slow_loss(student, teacher, ratios), rel=1e-5)


def gradient(loss, student: torch.Tensor) -> torch.Tensor:
    leaf = student.clone().requires_grad_()
    loss(leaf).backward()
    return leaf.grad


def test_gradient_is_that_of_forward_kl():
    student, teacher = logits(7, 2), logits(7, 3)
    got = gradient(lambda s: distillation_loss(s, teacher), student)
    forward = gradient(lambda s: F.kl_div(s.log_softmax(-1), teacher.softmax(-1), reduction="batchmean"), student)
    torch.testing.assert_close(got, forward)
    torch.testing.assert_close(got, (student.softmax(-1) - teacher.softmax(-1)) / 7)
    # negative control: reverse KL, which the paper writes and the authors' code does not use
    reverse = gradient(lambda s: F.kl_div(teacher.log_softmax(-1), s.softmax(-1), reduction="batchmean"), student)
    assert (got - reverse).abs().max() > 0.01


def test_nothing_masked_is_zero_with_a_gradient():
    student = logits(7, 4).requires_grad_()
    loss = distillation_loss(student[:0], logits(0, 5))
    loss.backward()
    assert loss.item() == 0.0 and torch.equal(student.grad, torch.zeros_like(student))


def exact(student, target, ratios, divergence, rows) -> torch.Tensor:
    """The loss in float64, term by term as the formula has it."""
    s = student.double().exp() / student.double().exp().sum(-1, keepdim=True)
    if target.ndim == 1:
        losses = -s[torch.arange(len(s)), target].log()
    else:
        t = target.double().exp() / target.double().exp().sum(-1, keepdim=True)
        losses = -(t * s.log()).sum(-1) if divergence == "forward" else (s * (s / t).log()).sum(-1)
    return (losses / ratios.double()).sum() / (rows or len(s))


@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize(("labels", "divergence"), [(False, "forward"), (False, "reverse"), (True, "forward")])
def test_value_and_gradient_equal_float64(labels, divergence, rows):
    student, ratios = logits(7, 6), torch.linspace(0.2, 0.7, 7)
    target = random_prompt(7, 3) if labels else logits(7, 7)
    arguments = (target, ratios, divergence, rows)
    assert float(distillation_loss(student, *arguments)) == pytest.approx(float(exact(student, *arguments)), rel=1e-5)
    got, wanted = (gradient(lambda s, f=f: f(s, *arguments), student) for f in (distillation_loss, exact))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_loss_is_float32_whatever_the_model(dtype, divergence):
    student, teacher = logits(7, 8), logits(7, 9)
    whole = distillation_loss(student, teacher, None, divergence)
    half = distillation_loss(student.to(dtype), teacher.to(dtype), None, divergence)
    assert half.dtype == torch.float32 and float(half) == pytest.approx(float(whole), rel=0.01)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_kl_at_the_vocabulary_of_dream(scale):
    """Sums over 152,064 probabilities: zero for equal logits, never below zero, and right for nearly equal ones."""
    draws = scale * torch.randn(3, 4, 152_064, generator=torch.Generator().manual_seed(0))
    teacher = draws[0].bfloat16()
    near, far = (teacher.float() + 0.001 * draws[1]).bfloat16(), draws[2].bfloat16()
    assert kl(teacher, teacher).abs().max() < 1e-4
    for student in (near, far):
        got = kl(teacher, student)
        log_t, log_s = (x.double().log_softmax(-1) for x in (teacher, student))
        torch.testing.assert_close(got.double(), (log_t.exp() * (log_t - log_s)).sum(-1), rtol=1e-4, atol=1e-7)
        assert got.min() >= -1e-6
    entropy = distillation_loss(teacher, teacher)
    assert entropy > 1  # negative control: the logged loss of a perfect student is far from zero
    assert float(distillation_loss(far, teacher) - entropy) == pytest.approx(float(kl(teacher, far).mean()), rel=1e-4)


@pytest.mark.parametrize("shift", [False, True])
def test_the_student_sees_nothing_of_later_blocks(shift):
    module, size = tiny_module(), 4
    ids = torch.cat([random_prompt(PROMPT, 0), torch.full((12,), MASK)])[None]
    masked = ids == MASK
    changed = ids.clone()
    changed[0, PROMPT + 2 * size :] = random_prompt(4, 1)  # the third block is no longer masked
    blocks = additive_visibility(PROMPT, 17, size)[None, None]
    with torch.no_grad():
        before, after = (predict_masked(module, x, masked, blocks, shift)[: 2 * size] for x in (ids, changed))
        assert torch.equal(before, after)
        full = everything_visible(ids, module)
        before, after = (predict_masked(module, x, masked, full, shift)[: 2 * size] for x in (ids, changed))
        assert not torch.allclose(before, after)  # negative control: the teacher does see it


class Spy:
    """A module that notes what it is fed; its logits come from a table of tokens."""

    def __init__(self, seed: int) -> None:
        self.seen, self.device, self.dtype = [], torch.device("cpu"), torch.float32
        self.table = logits(VOCABULARY * 64, seed).view(64, VOCABULARY, VOCABULARY)

    def model(self, ids, attention_mask):
        self.seen.append((ids.clone(), attention_mask.clone()))
        rows = self.table[torch.arange(ids.shape[1])[None].expand_as(ids), ids]  # by position and token
        return SimpleNamespace(last_hidden_state=rows)

    def lm_head(self, hidden):
        return hidden


class FixedExamples:
    """The same batch at every step: answers of 7, 12 and 18 tokens and their padding."""

    def __init__(self) -> None:
        rows = [random_prompt(PROMPT + ANSWER, seed) for seed in range(3)]
        for row, length in zip(rows, (7, 12, 18), strict=True):
            row[PROMPT + length :] = END
        self.ids = torch.stack(rows)

    def batch(self, size, generator):
        return Batch(self.ids, PROMPT)


@pytest.mark.parametrize("schedule", ["monotone", "increasing", "random", "steep"])
@pytest.mark.parametrize("shift", [False, True])
def test_one_step_of_the_student(schedule, shift):
    student, teacher, examples = Spy(0), Spy(1), FixedExamples()
    settings = DistillationSettings(schedule=schedule, block_sizes=(3, 8))
    step, sizes = student_loss(examples, 3, teacher, MASK, settings, shift), set()
    for number in range(12):
        value, tokens = step(student, number, step_generator(1, number))
        [(noisy, seen), (teacher_noisy, teacher_seen)] = student.seen[-1], teacher.seen[-1]
        assert torch.equal(noisy, teacher_noisy)
        assert not teacher_seen.any()  # everything is visible to the teacher
        found = [
            size
            for size in settings.block_sizes
            if torch.equal(seen[0, 0] == 0, torch.tensor(slow_visibility(PROMPT, PROMPT + ANSWER, size)))
        ]
        assert len(found) == 1
        sizes |= set(found)
        masked = noisy != examples.ids
        assert (noisy[masked] == MASK).all() and not masked[:, :PROMPT].any() and tokens == examples.ids.numel()
        at = torch.arange(PROMPT + ANSWER)[None].expand_as(noisy)
        rows = [spy.table[at, noisy][masked.roll(-1, dims=1) if shift else masked] for spy in (student, teacher)]
        assert float(value) == pytest.approx(slow_loss(*rows, None), rel=1e-4)  # so end-token padding counts
        assert (examples.ids[masked] == END).any()
    assert sizes == set(settings.block_sizes)


def test_inverse_ratio_weights_by_the_block():
    """At one fixed ratio the weighted loss is the plain one divided by it."""
    values = {}
    for weighting in ("none", "inverse_ratio"):
        settings = DistillationSettings("random", (0.5, 0.5), (4,), weighting)
        step = student_loss(FixedExamples(), 3, Spy(1), MASK, settings)
        values[weighting] = float(step(Spy(0), 0, step_generator(1, 0))[0])
    assert values["inverse_ratio"] == pytest.approx(values["none"] / 0.5)


def test_reverse_sums_over_the_blocks_of_a_row():
    settings = DistillationSettings(block_sizes=(4,), divergence="reverse", normalisation="rows")
    student, teacher = Spy(0), Spy(1)
    value, _ = student_loss(FixedExamples(), 3, teacher, MASK, settings)(student, 0, step_generator(1, 0))
    noisy = student.seen[0][0]
    at = torch.arange(noisy.shape[1])[None].expand_as(noisy)
    s, t = (spy.table[at, noisy].double().log_softmax(-1) for spy in (student, teacher))
    by_position = (s.exp() * (s - t)).sum(-1) * (noisy == MASK)
    by_block = [by_position[:, PROMPT + k : PROMPT + k + 4].sum(1) for k in range(0, ANSWER, 4)]
    assert float(value) == pytest.approx(float(sum(by_block).mean()), rel=1e-5)


def test_labels_need_no_teacher():
    student, teacher, examples = Spy(0), Spy(1), FixedExamples()
    step = student_loss(examples, 3, teacher, MASK, DistillationSettings(block_sizes=(4,), target="data"))
    value, _ = step(student, 0, step_generator(1, 0))
    noisy = student.seen[0][0]
    at = torch.arange(noisy.shape[1])[None].expand_as(noisy)
    masked = noisy != examples.ids
    wanted = F.cross_entropy(student.table[at, noisy][masked], examples.ids[masked])
    assert float(value) == pytest.approx(float(wanted), rel=1e-5) and not teacher.seen


@pytest.mark.parametrize("mode", MODES)
def test_thirty_steps_of_either_mode_bring_the_student_closer(mode):
    settings = build(DistillationSettings, MODES[mode], "distillation")  # as a study would
    student, teacher = tiny_module(seed=1).train(), tiny_module(seed=0).requires_grad_(False)
    step = student_loss(FixedExamples(), 3, teacher, MASK, settings)
    masked = torch.zeros(3, PROMPT + ANSWER, dtype=torch.bool)
    masked[:, PROMPT + 4 :: 2] = True
    noisy = FixedExamples().ids.masked_fill(masked, MASK)
    visibility = additive_visibility(PROMPT, PROMPT + ANSWER, 16)[None, None]

    @torch.no_grad()
    def distance() -> float:
        full = predict_masked(teacher, noisy, masked, everything_visible(noisy, teacher))
        return float(kl(full, predict_masked(student, noisy, masked, visibility)).mean())

    before, optimizer = distance(), torch.optim.AdamW(student.parameters(), lr=3e-3)
    for number in range(30):
        optimizer.zero_grad()
        step(student, number, step_generator(1, number))[0].backward()
        optimizer.step()
    assert distance() < 0.7 * before
    assert student.training and not teacher.training  # the teacher's pass leaves both as they were


def test_a_real_step_moves_only_the_student(tmp_path):
    from backbone.examples import Examples
    from backbone.pretraining import Shape, new_model
    from harness.tasks.problems import Difficulty, problems
    from harness.tasks.tokenizer import make_tokenizer

    tokenizer, source = make_tokenizer(), problems("train", 1, Difficulty(steps=(1, 2)))
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(next(source)) + "\n" for _ in range(20)))
    shape = Shape(hidden_size=16, layers=1, heads=2, kv_heads=2, intermediate_size=16)
    student, teacher = (new_model(shape, tokenizer, seed) for seed in (1, 2))
    teacher.requires_grad_(False)
    step = student_loss(Examples(data, tokenizer, 64), 4, teacher, tokenizer.mask_token_id, DistillationSettings())
    value, _ = step(student, 0, step_generator(1, 0))
    value.backward()
    assert math.isfinite(float(value))
    assert all(weight.grad is not None and bool(weight.grad.isfinite().all()) for weight in student.parameters())
    assert all(weight.grad is None for weight in teacher.parameters())
