"""The answer to the study's question, in words chosen by rules fixed beforehand.

*Faster* and *slower* need the whole interval of the speed ratio on one side of 1. *Equal accuracy* needs
the whole interval of the paired difference inside the study's margin: a test that finds nothing shows
nothing, so "no difference found" is another sentence. The terminal and the report print the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.tables import AR, D2F, numbers


@dataclass(frozen=True)
class Answer:
    """Is ``system`` faster than AR, and at which accuracy?

    Args:
        speed: ``faster``, ``slower``, ``undecided`` or ``unknown``.
        quality: ``equal``, ``better``, ``worse``, ``undecided`` or ``unknown``.
        about_speed, about_quality: the same as a sentence with its numbers.
    """

    speed: str
    quality: str
    about_speed: str
    about_quality: str


def judge_speed(row: dict, system: str, confidence: float) -> tuple[str, str]:
    """The verdict on the ratio to AR, and its sentence."""
    ratio, low, high = (row.get("ratio_to_ar" + end) for end in ("", "_low", "_high"))
    if ratio is None:
        return "unknown", f"Whether {system} is faster than {AR} was not measured."
    interval = f"({confidence:.0%} interval {low:.2f} to {high:.2f})"
    times = f"{ratio:.2f} times its useful tokens per second {interval}"
    if low > 1:
        return "faster", f"{system} is faster than {AR}: {times}."
    if high < 1:
        return "slower", f"{system} is slower than {AR}: {times}."
    return "undecided", f"No speed difference found between {system} and {AR}: ratio {ratio:.2f} {interval}."


def judge_quality(row: dict, margin: float, confidence: float) -> tuple[str, str]:
    """The verdict on the paired accuracy difference, and its sentence; only an interval inside the margin is *equal*."""
    apart, low, high = (row.get("difference_to_ar" + end) for end in ("", "_low", "_high"))
    if None in (apart, low, high, row["p_value"]):
        return "unknown", "The accuracies were not compared."
    p_value, problems = row["p_value"], row["shared_problems"]
    numbers = (
        f"difference {100 * apart:+.1f} points ({confidence:.0%} interval {100 * low:+.1f} to {100 * high:+.1f}, "
        f"McNemar p = {p_value:.2g}, {problems} problems)"
    )
    bound = f"margin of {100 * margin:g} points"
    found = p_value < 1 - confidence
    if -margin <= low and high <= margin:
        though = " (though not the same)" if found else ""
        return "equal", f"Accuracy is equal within the {bound}{though}: {numbers}."
    if found:
        return (
            ("better", f"Accuracy is higher: {numbers}.") if apart > 0 else ("worse", f"Accuracy is lower: {numbers}.")
        )
    return "undecided", f"No accuracy difference found, but one beyond the {bound} is not ruled out: {numbers}."


def answer(summary: dict, system: str = D2F) -> Answer:
    """The answer to the study's question."""
    entry, rules = summary["systems"].get(system), summary["statistics"]
    if entry is None:
        return Answer(
            "unknown", "unknown", f"This study has no system {system!r}.", "The accuracies were not compared."
        )
    row = numbers(entry)
    speed, about_speed = judge_speed(row, system, rules["confidence"])
    quality, about_quality = judge_quality(row, rules["margin"], rules["confidence"])
    return Answer(speed, quality, about_speed, about_quality)
