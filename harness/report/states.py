"""What every position of the answer was doing at every step of a D2F decode, read from its trace.

A block is appended (semi-activated, then fully activated), its masks are committed one after the other, it is
fed once more with its final tokens, and from then on it is cached. A block in front of the first live one is cached.
"""

from __future__ import annotations

import itertools

from backbone.trace import SEMI, Trace

# In the order a position passes through them
NOT_APPENDED, SEMI_MASK, FULL_MASK, COMMITTED, DECODED, CACHED = STATES = (
    "not appended",
    "masked semi-activated",
    "masked fully activated",
    "committed",
    "decoded",
    "cached",
)


def position_states(trace: Trace) -> list[list[str]]:
    """The state (one of ``STATES``) of every position of the answer, step by step.

    Up to the last block that was ever appended. Blocks in front of the first live one are cached.
    """
    begun = [step for step in trace.steps if step.blocks]
    last = max((step.blocks[-1][0] for step in begun), default=0)
    length = min(last * trace.block_size, trace.max_new_tokens)
    decoded, rows = set(), []
    for step in begun:
        now = {position - trace.prompt_length for position in step.positions}
        live = dict(step.blocks)
        rows.append([state(place, place // trace.block_size + 1, live, now, decoded) for place in range(length)])
        decoded |= now
    return rows


def state(place: int, block: int, live: dict[int, str], now: set[int], decoded: set[int]) -> str:
    """The state of one position at one step."""
    if block not in live:
        return CACHED if block < min(live) else NOT_APPENDED
    if place in now:
        return COMMITTED
    if place in decoded:
        return DECODED
    return SEMI_MASK if live[block] == SEMI else FULL_MASK


def runs(row: list[str]) -> list[tuple[str, int, int]]:
    """Neighbours of the same state as one (state, start, stop)."""
    edges = [0, *(i for i in range(1, len(row)) if row[i] != row[i - 1]), len(row)]
    return [(row[start], start, stop) for start, stop in itertools.pairwise(edges)]
