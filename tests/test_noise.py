"""Block noise schedules: bounds, order, means, and what the decoder will show the student."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from d2f.distillation import DistillationSettings
from d2f.noise import CLEAN, SCHEDULES, block_ratios, increasing, monotone
from tests.test_blocks import VECTORS

LOW, HIGH = 0.2, 0.7


def draw(schedule: str, rows: int = 4000, blocks: int = 12, seed: int = 0, answered: int | None = None) -> torch.Tensor:
    lengths = torch.full((rows,), float(blocks if answered is None else answered))
    return block_ratios(schedule, rows, blocks, lengths, LOW, HIGH, torch.Generator().manual_seed(seed))


def slow_monotone(first: float, increments: list[float]) -> list[float]:
    """The recurrence of the authors' code, one block at a time."""
    ratios = [LOW + (HIGH - LOW) * first]
    for u in increments:
        ratios.append(min(1.0, ratios[-1] + u * (HIGH - ratios[0]) / len(increments)))
    return ratios


def test_monotone_equals_the_recurrence():
    generator = torch.Generator().manual_seed(3)
    first, increments = torch.rand(50, 1, generator=generator), torch.rand(50, 9, generator=generator)
    wanted = torch.tensor([slow_monotone(f, row) for [f], row in zip(first.tolist(), increments.tolist(), strict=True)])
    torch.testing.assert_close(monotone(first, increments, LOW, HIGH), wanted)


@pytest.mark.parametrize("case", range(3))
def test_monotone_equals_the_recorded_schedules(case):
    recorded = load_file(VECTORS / "d2f-noise-schedule.safetensors")
    first, steps, wanted = (recorded[f"{case}.{name}"] for name in ("u_first", "u_steps", "ratios"))
    torch.testing.assert_close(monotone(first, steps, LOW, HIGH), wanted, rtol=0, atol=1e-6)
    # negative control: the paper's lowest ratio
    assert (monotone(first, steps, 0.3, HIGH) - wanted).abs().max() > 0.01


def test_monotone_never_falls_and_stays_within():
    ratios = draw("monotone")
    assert (ratios.diff(dim=1) >= 0).all()
    assert ratios.min() >= LOW and ratios.max() <= HIGH + 1e-6


def test_monotone_means():
    """First block: the middle; last: half of the remaining gap above it (measured so in the reference)."""
    ratios = draw("monotone", rows=40_000, blocks=30)
    assert ratios[:, 0].mean() == pytest.approx(0.450, abs=0.005)
    assert ratios[:, -1].mean() == pytest.approx(0.575, abs=0.005)
    assert ratios.mean() == pytest.approx(0.513, abs=0.005)


@pytest.mark.parametrize("blocks", [1, 2, 12, 64])
def test_increasing_is_strict_and_spans_the_range(blocks):
    ratios = draw("increasing", rows=20_000, blocks=blocks)
    assert (ratios.diff(dim=1) > 0).all()
    assert ratios.min() >= LOW and ratios.max() <= HIGH
    step = (HIGH - LOW) / blocks
    assert ratios[:, 0].mean() == pytest.approx(LOW + step / 2, abs=0.005)
    assert ratios[:, -1].mean() == pytest.approx(HIGH - step / 2, abs=0.005)


def test_increasing_equals_its_formula():
    got = increasing(torch.tensor([[0.0], [0.5]]), 4, 0.3, 0.7)
    torch.testing.assert_close(got, torch.tensor([[0.3, 0.4, 0.5, 0.6], [0.35, 0.45, 0.55, 0.65]]))


def test_random_is_independent_and_uniform():
    ratios = draw("random", rows=20_000, blocks=4)
    assert ratios.min() >= LOW and ratios.max() <= HIGH
    assert ratios.mean() == pytest.approx((LOW + HIGH) / 2, abs=0.005)
    assert ratios.std() == pytest.approx((HIGH - LOW) / 12**0.5, abs=0.005)
    off_diagonal = torch.corrcoef(ratios.T) - torch.eye(4)
    assert off_diagonal.abs().max() < 0.04
    # negative control: the monotone schedule is anything but independent
    assert torch.corrcoef(draw("monotone", rows=20_000, blocks=4).T)[0, 1] > 0.5


def test_steep_shows_fully_masked_blocks_and_never_leaves_one_clean():
    ratios = draw("steep")
    fronts, sorted_rows = ratios[:2000], ratios[2000:]
    assert ratios.min() >= CLEAN > 0 and ratios.max() <= 1
    assert (ratios.diff(dim=1) >= 0).all()
    assert (fronts == 1).any(dim=1).float().mean() > 0.8  # nearly every front leaves new blocks behind it
    assert ((fronts == CLEAN).any(dim=1) & (fronts == 1).any(dim=1)).any()  # clean blocks, then masked ones
    assert sorted_rows.mean() == pytest.approx(0.5, abs=0.02)
    # negative control: the authors' schedule never shows what every new block looks like
    assert not (draw("monotone") == 1).any()


def test_steep_fronts_stay_in_the_answer():
    """With two answered blocks of twelve the ramp is over before the padding's end."""
    fronts = draw("steep", answered=2)[:2000]
    assert (fronts[:, 6:] == 1).all()
    assert not (draw("steep")[:2000, 6:] == 1).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (1, 7), (5, 1), (5, 7)])
def test_shapes_and_seeds(schedule, rows, blocks):
    ratios = draw(schedule, rows=rows, blocks=blocks)
    assert ratios.shape == (rows, blocks)
    assert torch.equal(ratios, draw(schedule, rows=rows, blocks=blocks))
    assert not torch.equal(ratios, draw(schedule, rows=rows, blocks=blocks, seed=1)) or bool((ratios == CLEAN).all())


@pytest.mark.parametrize(
    "wrong",
    [{"schedule": "linear"}, {"ratios": (0.0, 0.7)}, {"ratios": (0.7, 0.2)}, {"ratios": (0.2, 1.1)}, {"block_sizes": ()},
     {"block_sizes": (8, 0)}, {"weighting": "ratio"}, {"divergence": "backward"}, {"normalisation": "tokens"},
     {"target": "labels"}, {"target": "data", "divergence": "reverse"}],
)  # fmt: skip
def test_bad_settings_are_refused_with_their_name(wrong):
    with pytest.raises(ValueError, match=f"distillation.{next(iter(wrong))}"):
        DistillationSettings(**wrong)
