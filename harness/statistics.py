"""Intervals and paired tests. scipy where it has them."""

from __future__ import annotations

import numpy as np
from scipy import stats


def accuracy_interval(correct: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson interval of a proportion."""
    if total < 1:
        raise ValueError("an accuracy needs at least one problem")
    interval = stats.binomtest(correct, total).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def paired_ratio(
    numerator: np.ndarray, denominator: np.ndarray, *, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """Ratio of two rates with its bootstrap interval, resampling prompts.

    Args:
        numerator, denominator: (prompts, 2) columns tokens and seconds of the two systems on the same
            prompts, in the same order; a rate is sum of tokens / sum of seconds.

    Returns:
        (ratio, low, high).
    """
    if numerator.shape != denominator.shape or len(numerator) == 0:
        raise ValueError(f"paired rates need the same prompts: {len(numerator)} against {len(denominator)}")

    def rate(rows: np.ndarray) -> np.ndarray:
        totals = rows.sum(axis=-2)
        return totals[..., 0] / totals[..., 1]

    picks = np.random.default_rng(seed).integers(len(numerator), size=(resamples, len(numerator)))
    ratios = rate(numerator[picks]) / rate(denominator[picks])
    edge = (1 - confidence) / 2
    low, high = np.quantile(ratios, [edge, 1 - edge])
    return float(rate(numerator) / rate(denominator)), float(low), float(high)


def paired_accuracy(system: dict[int, bool], base: dict[int, bool], confidence: float = 0.95) -> dict[str, float]:
    """Difference of two accuracies on the problems both answered, with McNemar's exact test.

    Returns:
        ``problems``, ``difference`` (system - base), its ``interval`` and ``p_value`` of no difference. The interval
        is the normal approximation; where no problem told the two apart it would have no width at all, however
        few the problems, and the exact bound on a share of which none was seen takes its place.
    """
    shared = sorted(system.keys() & base.keys())
    if not shared:
        raise ValueError("the two systems have no problem in common")
    wins = sum(system[i] and not base[i] for i in shared)
    losses = sum(base[i] and not system[i] for i in shared)
    difference = (wins - losses) / len(shared)
    variance = (wins + losses) / len(shared) - difference**2
    if wins + losses:
        reach = float(stats.norm.ppf((1 + confidence) / 2) * np.sqrt(variance / len(shared)))
    else:
        reach = 1 - ((1 - confidence) / 2) ** (1 / len(shared))
    p_value = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    return {
        "problems": len(shared),
        "difference": difference,
        "interval": [difference - reach, difference + reach],
        "p_value": float(p_value),
    }
