"""Intervals and tests: known values, and whether an interval covers the truth as often as it says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.statistics import accuracy_interval, paired_accuracy, paired_ratio


def slow_wilson(correct: int, total: int, z: float) -> tuple[float, float]:
    p, n = correct / total, total
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - reach), min(1.0, centre + reach)


@pytest.mark.parametrize(("correct", "total"), [(0, 10), (10, 10), (1, 1), (81, 263), (7, 20), (500, 1000)])
def test_wilson_equals_its_formula(correct, total):
    assert accuracy_interval(correct, total) == pytest.approx(slow_wilson(correct, total, 1.959963984540054), abs=1e-12)
    assert accuracy_interval(correct, total, 0.9) == pytest.approx(
        slow_wilson(correct, total, 1.6448536269514722), abs=1e-12
    )


def test_wilson_published_value():
    """Newcombe 1998, table I: 81 of 263 and 0 of 20."""
    assert accuracy_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert accuracy_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_an_accuracy_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one problem"):
        accuracy_interval(0, 0)


def synthetic(rng: np.random.Generator, prompts: int, ratio: float) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and seconds of two systems whose rates really differ by ``ratio``; hard prompts are slow for both."""
    difficulty = rng.lognormal(0, 0.5, prompts)
    tokens = rng.integers(20, 100, prompts).astype(float)
    seconds = [tokens * difficulty * rng.lognormal(0, 0.1, prompts) for _ in range(2)]
    return np.stack([ratio * tokens, seconds[0]], axis=1), np.stack([tokens, seconds[1]], axis=1)


def test_paired_ratio_covers_the_truth():
    rng, trials, truth = np.random.default_rng(0), 200, 2.5
    covered = 0
    for trial in range(trials):
        ratio, low, high = paired_ratio(*synthetic(rng, 40, truth), resamples=400, seed=trial)
        assert low <= ratio <= high
        covered += low <= truth <= high
    assert 0.87 * trials <= covered <= trials * 0.995  # 95 % asked; the bootstrap is a little narrow


def test_pairing_matters():
    """Negative control: with the prompts of one system shuffled, the shared difficulty no longer cancels."""
    rng = np.random.default_rng(1)
    numerator, denominator = synthetic(rng, 60, 2.0)
    _, low, high = paired_ratio(numerator, denominator)
    _, loose_low, loose_high = paired_ratio(rng.permutation(numerator), denominator)
    assert high - low < 0.5 * (loose_high - loose_low)


def test_paired_ratio_is_a_ratio_of_sums_and_seeded():
    numerator, denominator = np.array([[10.0, 1.0], [30.0, 9.0]]), np.array([[10.0, 5.0], [10.0, 5.0]])
    ratio, low, high = paired_ratio(numerator, denominator)
    assert ratio == pytest.approx((40 / 10) / (20 / 10))
    assert (ratio, low, high) == paired_ratio(numerator, denominator)
    assert (low, high) != (ratio, ratio)
    assert paired_ratio(numerator, numerator) == pytest.approx((1.0, 1.0, 1.0))


def test_wider_confidence_is_a_wider_interval():
    data = synthetic(np.random.default_rng(2), 40, 2.0)
    _, low, high = paired_ratio(*data, confidence=0.95)
    _, inner_low, inner_high = paired_ratio(*data, confidence=0.5)
    assert low < inner_low < inner_high < high


@pytest.mark.parametrize("shapes", [((3, 2), (4, 2)), ((0, 2), (0, 2))])
def test_unpaired_rates_are_refused(shapes):
    with pytest.raises(ValueError, match="same prompts"):
        paired_ratio(*(np.ones(shape) for shape in shapes))


def answers(both: int, wins: int, losses: int, neither: int) -> tuple[dict, dict]:
    """Correctness by problem of a system and its base, from a table of four counts."""
    pairs = [(True, True)] * both + [(True, False)] * wins + [(False, True)] * losses + [(False, False)] * neither
    return {n: s for n, (s, _) in enumerate(pairs)}, {n: b for n, (_, b) in enumerate(pairs)}


def slow_mcnemar(wins: int, losses: int) -> float:
    """Two-sided exact: the probability of a split at least as uneven if each side were equally likely."""
    n, edge = wins + losses, min(wins, losses)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(edge + 1)) / 2**n)


@pytest.mark.parametrize(("wins", "losses"), [(2, 10), (10, 2), (5, 5), (0, 6), (1, 0), (30, 12)])
def test_mcnemar_equals_its_formula(wins, losses):
    found = paired_accuracy(*answers(20, wins, losses, 8))
    assert found["p_value"] == pytest.approx(slow_mcnemar(wins, losses))
    total = 28 + wins + losses
    assert found["problems"] == total and found["difference"] == pytest.approx((wins - losses) / total)
    low, high = found["interval"]
    assert low <= found["difference"] <= high
    assert (low + high) / 2 == pytest.approx(found["difference"])


def test_mcnemar_known_value():
    """2 against 10: p = 0.0386 (exact binomial)."""
    assert paired_accuracy(*answers(0, 2, 10, 0))["p_value"] == pytest.approx(0.03857, abs=1e-5)


@pytest.mark.parametrize(("problems", "reach"), [(7, 0.410), (20, 0.168), (500, 0.0074)])
def test_agreement_has_the_exact_bound_as_interval(problems, reach):
    """The normal interval would have no width, however few the problems."""
    found = paired_accuracy(*answers(problems, 0, 0, 0))
    assert (found["difference"], found["p_value"], found["problems"]) == (0.0, 1.0, problems)
    assert found["interval"] == pytest.approx([-reach, reach], abs=5e-4)


def test_only_shared_problems_count():
    system, base = answers(2, 3, 1, 0)
    base.pop(0)
    assert paired_accuracy({**system, 99: True}, base)["problems"] == 5
    with pytest.raises(ValueError, match="no problem in common"):
        paired_accuracy({1: True}, {2: True})


def test_paired_interval_covers_the_truth():
    """Wins with probability 0.2, losses 0.1: the true difference is 0.1."""
    rng, covered, trials = np.random.default_rng(3), 0, 300
    for _ in range(trials):
        wins, losses, rest = rng.multinomial(200, [0.2, 0.1, 0.7])
        low, high = paired_accuracy(*answers(rest, wins, losses, 0))["interval"]
        covered += low <= 0.1 <= high
    assert 0.91 * trials <= covered <= 0.99 * trials
