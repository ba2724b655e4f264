"""Token counts and rates, all derived from stored traces and never mixed up.

| name      | counts                                                                   |
|-----------|--------------------------------------------------------------------------|
| committed | every generated position                                                 |
| answered  | up to and including the first end token                                  |
| useful    | up to where the scorer stops reading (end token or stop string)          |
| fed       | positions that went through the network (the compute)                    |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from backbone.trace import Trace


@dataclass(frozen=True)
class Counts:
    """What one decode, or many added up, produced and cost.

    ``decode_forwards`` are the forwards without the prefill of systems that have one to themselves: a
    prefill that commits tokens (every diffusion system here, and AR's, which yields its first token) is
    a decode forward as well, so it equals ``forwards`` minus those that committed nothing.
    """

    committed: int = 0
    answered: int = 0
    useful: int = 0
    fed: int = 0
    forwards: int = 0
    decode_forwards: int = 0
    seconds: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Counts)))

    def to_json(self) -> dict:
        return asdict(self)


def answered_length(tokens: list[int], end_ids: Iterable[int]) -> int:
    """Tokens up to and including the first end token; all of them when there is none."""
    ends = [tokens.index(end) for end in end_ids if end in tokens]
    return min(ends) + 1 if ends else len(tokens)


def count(trace: Trace, useful: int, end_ids: Iterable[int]) -> Counts:
    """The counts of one trace; ``useful`` is what the scorer read of it, see :func:`useful_length`."""
    return Counts(
        committed=sum(len(step.positions) for step in trace.steps),
        answered=answered_length(trace.tokens, end_ids),
        useful=useful,
        fed=sum(step.fed for step in trace.steps),
        forwards=len(trace.steps),
        decode_forwards=sum(not (step.prefill and not step.positions) for step in trace.steps),
        seconds=trace.seconds,
    )


def useful_length(tokens: list[int], end_ids: Iterable[int], stops: list[str], decode) -> int:
    """Tokens the scorer reads: up to the first end token, or to the token that completes a stop string.

    Args:
        tokens: the answer.
        end_ids: ids that end an answer.
        stops: strings at which the scorer cuts the text.
        decode: token ids -> text.
    """
    length = answered_length(tokens, end_ids)
    stops = [stop for stop in stops if stop]
    if not any(stop in decode(tokens[:length]) for stop in stops):
        return length
    low, high = 1, length  # the shortest prefix whose text holds a stop string
    while low < high:
        middle = (low + high) // 2
        if any(stop in decode(tokens[:middle]) for stop in stops):
            high = middle
        else:
            low = middle + 1
    return low


def quotient(above: float, below: float) -> float | None:
    """``above / below``; None (not measured) where nothing was decoded."""
    return above / below if below else None


def rates(total: Counts, problems: int) -> dict[str, float | None]:
    """Rates of added-up counts, as ratios of sums; keys as in ``summary.json``."""
    return {
        "useful_tokens_per_second": quotient(total.useful, total.seconds),
        "latency_seconds": quotient(total.seconds, problems),
        "tokens_per_forward": quotient(total.useful, total.decode_forwards),
        "token_efficiency": quotient(total.useful, total.fed),
        "forwards": quotient(total.forwards, problems),
        "length": quotient(total.answered, problems),
    }


def attribution(system: Counts, base: Counts) -> dict[str, float] | None:
    """Why ``system`` is faster than ``base``: three factors whose product is the ratio of useful tokens/s.

    None where one of the two decoded nothing.
    """
    if not (system.committed and base.committed and base.useful):
        return None
    return {
        "useful_share": (system.useful / system.committed) / (base.useful / base.committed),
        "tokens_per_forward": (system.committed / system.forwards) / (base.committed / base.forwards),
        "forwards_per_second": (system.forwards / system.seconds) / (base.forwards / base.seconds),
    }
