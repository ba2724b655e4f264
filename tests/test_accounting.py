"""Token counts on traces made by hand, where every number can be counted with a finger."""

from __future__ import annotations

import pytest

from backbone.trace import Step, Trace
from harness.accounting import Counts, answered_length, attribution, count, rates, useful_length

END = 0
# prompt of 10; prefill alone, then three steps; 6 positions committed, the end token is the fourth
STEPS = [
    Step(0.2, 10, 10, [], [], prefill=True),
    Step(0.1, 8, 18, [10, 11], [5, 6]),
    Step(0.1, 8, 18, [12, 13, 15], [7, END, 9]),
    Step(0.1, 8, 18, [14], [8]),
]
TRACE = Trace(10, 8, 8, [5, 6, 7, END, 8, 9], 0.6, STEPS)
SYSTEM = Counts(committed=60, answered=50, useful=40, fed=800, forwards=20, decode_forwards=18, seconds=2.0)
BASE = Counts(committed=45, answered=45, useful=45, fed=145, forwards=45, decode_forwards=45, seconds=3.0)


def spell(tokens: list[int]) -> str:
    """Token n is the n-th letter; the end token is invisible."""
    return "".join(chr(ord("a") + token) for token in tokens if token != END)


def test_counts_of_a_trace_made_by_hand():
    assert count(TRACE, useful=3, end_ids=(END,)) == Counts(
        committed=6, answered=4, useful=3, fed=34, forwards=4, decode_forwards=3, seconds=0.6
    )


def test_a_prefill_that_commits_is_a_decode_forward():
    fused = Trace(10, 2, 2, [5, 6], 0.3, [Step(0.3, 12, 12, [10, 11], [5, 6], prefill=True)])
    assert count(fused, 2, (END,)).decode_forwards == 1


def test_counts_add_up():
    one = count(TRACE, 3, (END,))
    assert one + one + Counts() == Counts(12, 8, 6, 68, 8, 6, 1.2)
    assert one.to_json()["fed"] == 34


@pytest.mark.parametrize(
    ("tokens", "ends", "length"),
    [([5, 6], (END,), 2), ([5, END, 6, END], (END,), 2), ([END], (END,), 1), ([], (END,), 0), ([5, 9, END], (END, 9), 2),
     ([5, 6], (), 2)],
)  # fmt: skip
def test_answered_ends_with_the_first_end_token(tokens, ends, length):
    assert answered_length(tokens, ends) == length


def slow_useful(tokens: list[int], stops: list[str]) -> int:
    """Read token by token until the scorer would stop."""
    for length in range(1, len(tokens) + 1):
        if tokens[length - 1] == END or any(stop and stop in spell(tokens[:length]) for stop in stops):
            return length
    return len(tokens)


@pytest.mark.parametrize("stops", [[], [""], ["d"], ["cd"], ["gh"], ["z"], ["fg", "c"], ["bcdefgh"]])
@pytest.mark.parametrize("tokens", [[1, 2, 3, 4, 5, 6, 7], [1, 2, END, 3, 4], [END], [], [3], [6, 7, 2, 3, 6, 7]])
def test_useful_stops_where_the_scorer_does(tokens, stops):
    assert useful_length(tokens, (END,), stops, spell) == slow_useful(tokens, stops)


def test_a_stop_string_behind_the_end_token_does_not_count():
    assert useful_length([1, END, 3], (END,), ["d"], spell) == 2
    assert useful_length([1, 4, 3], (END,), ["d"], spell) == 3


def test_rates_are_ratios_of_sums():
    found = rates(SYSTEM, problems=5)
    assert found == {
        "useful_tokens_per_second": 20.0,
        "latency_seconds": 0.4,
        "tokens_per_forward": pytest.approx(40 / 18),
        "token_efficiency": 0.05,
        "forwards": 4.0,
        "length": 10.0,
    }
    slow, fast = Counts(1, 1, 1, 1, 1, 1, 1.0), Counts(9, 9, 9, 9, 9, 9, 1.0)
    mean_of_ratios = (rates(slow, 1)["useful_tokens_per_second"] + rates(fast, 1)["useful_tokens_per_second"]) / 2
    uneven = slow + fast + fast
    assert rates(uneven, 3)["useful_tokens_per_second"] == pytest.approx(19 / 3) != mean_of_ratios


def test_attribution_multiplies_to_the_ratio():
    factors = attribution(SYSTEM, BASE)
    product = factors["useful_share"] * factors["tokens_per_forward"] * factors["forwards_per_second"]
    assert product == pytest.approx((40 / 2.0) / (45 / 3.0))
    assert factors == {
        "useful_share": pytest.approx(40 / 60),
        "tokens_per_forward": pytest.approx(3.0),
        "forwards_per_second": pytest.approx(10 / 15),
    }


def test_attribution_of_a_system_to_itself_is_one():
    assert set(attribution(SYSTEM, SYSTEM).values()) == {1.0}
