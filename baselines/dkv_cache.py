"""dKV-Cache (arXiv:2505.15781): keys and values of a token are kept one step *after* it was committed.

A token's states move most at the step in which it appears, so it is fed once more as itself and cached
from that forward; everything is refreshed every ``refresh_interval`` steps. Per family:

- LLaDA *decode*: whatever is still masked is fed, whatever was known a step earlier is not.
- LLaDA *greedy*: an order of random remasking is drawn beforehand, and only what was just committed, what
  comes next, and a window around that are fed; the rest keeps its states from whenever it was last fed.
- Dream *decode*, *prefill* (the prompt alone, never refreshed) and *pd* (both: a refresh spares the prompt).
  Row i predicts token i + 1, so a known token's row is still needed while its successor is masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backbone.sampling import predictions
from backbone.selection import check_choice, check_size, quotas
from baselines.canvas import Canvas
from baselines.dream import DreamDecoder, DreamSettings
from baselines.llada import FullForward, LLaDADecoder, LLaDASettings, steps_per_block


@dataclass(frozen=True)
class DKVCacheSettings(LLaDASettings):
    """Settings for LLaDA; the rest as in :class:`LLaDASettings`.

    Args:
        variant: ``decode`` or ``greedy`` (random remasking).
        refresh_interval: steps within a block between forwards of everything.
        window: ``greedy``: how many masked neighbours of each coming token are fed too.
    """

    variant: str = "decode"
    refresh_interval: int = 8
    window: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("variant", self.variant, ("decode", "greedy"))
        check_size("refresh_interval", self.refresh_interval)
        check_size("window", self.window, 0)
        if self.guidance:
            raise ValueError(f"guidance is {self.guidance}: dKV-Cache has none, leave it 0")


@dataclass(frozen=True)
class DKVCacheDreamSettings(DreamSettings):
    """Settings for Dream; the rest as in :class:`DreamSettings`.

    Args:
        variant: ``decode``, ``prefill`` or ``pd``.
        refresh_interval: steps between refreshes.
        shift_rule: ``un_right`` keeps a token whose successor is known when it is known itself; ``un``, the
            public default, asks for the successor only and takes the first position for the last one's.
    """

    variant: str = "decode"
    refresh_interval: int = 4
    shift_rule: str = "un"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("variant", self.variant, ("decode", "prefill", "pd"))
        check_choice("shift_rule", self.shift_rule, ("un", "un_right"))
        check_size("refresh_interval", self.refresh_interval)


class PartialForward(FullForward):
    """Feed some positions of each row; they see every slot, whenever it was written."""

    def feed(self, wanted: torch.Tensor, asked: list[int]) -> tuple[torch.Tensor, int]:
        """Logits (rows, A, V) after feeding the positions marked in ``wanted`` (rows, P + R), as many in each row."""
        counts = wanted.sum(dim=1)
        if not bool((counts == counts[0]).all()):
            raise ValueError("the rows of this batch need different numbers of positions: decode them one by one")
        fed = wanted.nonzero()[:, 1].view(len(wanted), -1)  # (rows, Q)
        return self.canvas.predict(fed, asked), fed.shape[1]


class DecodeForward(PartialForward):
    """LLaDA: everything that was not known before the last step is fed."""

    def __init__(self, canvas: Canvas, refresh_interval: int) -> None:
        super().__init__(canvas)
        self.refresh_interval = refresh_interval

    def __call__(self, step: int, asked: list[int]) -> tuple[torch.Tensor, int]:
        known = self.canvas.ids != self.canvas.network.mask_id
        if step < 2 or step % self.refresh_interval == 0:
            answer = super().__call__(step, asked)
        else:
            answer = self.feed(~self.known, asked)
        self.known = known
        return answer


class DKVCacheDecoder(LLaDADecoder):
    """dKV-Cache on LLaDA; ``settings``: :class:`DKVCacheSettings`."""

    def forward(self, canvas: Canvas) -> DecodeForward:
        return DecodeForward(canvas, self.settings.refresh_interval)

    def fill(self, canvas: Canvas) -> None:
        if self.settings.variant == "decode":
            return super().fill(canvas)
        if canvas.rows > 1:
            raise ValueError(f"dKV-Cache greedy decodes one row at a time, not {canvas.rows}")
        for begin, stop in canvas.blocks():
            if not canvas.ended():
                self.fill_greedily(canvas, self.order(canvas, begin, stop))

    def order(self, canvas: Canvas, begin: int, stop: int) -> list[int]:
        """The positions of a block in the random order in which they are committed."""
        return (begin + canvas.draw(stop - begin).argsort()).tolist()

    def fill_greedily(self, canvas: Canvas, order: list[int]) -> None:
        settings, forward = self.settings, PartialForward(canvas)
        active: set[int] = set()
        turns, start = [], 0
        for quota in quotas(len(order), steps_per_block(canvas, settings.steps)):
            turns.append(order[start : start + quota])
            start += quota
        for step, (turn, coming) in enumerate(zip(turns, [*turns[1:], []], strict=True)):
            if canvas.ended():
                return
            asked = sorted(turn)
            if step % settings.refresh_interval == 0:
                logits, fed = forward(step, asked)
            else:
                wanted = torch.zeros(1, canvas.end, dtype=torch.bool, device=canvas.network.device)
                wanted[:, sorted(active)] = True
                logits, fed = forward.feed(wanted, asked)
            tokens, confidences = predictions(logits, self.network.mask_id)
            canvas.commit(fed, asked, tokens, confidences, lambda c: list(range(len(c))))
            active = {*turn, *coming}
            for position in coming:
                active |= self.neighbours(canvas, position, active)

    def neighbours(self, canvas: Canvas, position: int, active: set[int]) -> set[int]:
        """The nearest masked positions that are not active yet, left and right in turn."""
        masked, found = set(canvas.masked(0, canvas.start, canvas.end)), set()
        for distance in range(1, canvas.end):
            for neighbour in (position - distance, position + distance):
                if len(found) < self.settings.window and neighbour in masked and neighbour not in active:
                    found.add(neighbour)
        return found


class DreamForward(PartialForward):
    """Dream: what is fed depends on which tokens' successors are known."""

    def __init__(self, canvas: Canvas, settings: DKVCacheDreamSettings) -> None:
        super().__init__(canvas)
        self.settings = settings
        self.prompt = torch.zeros_like(canvas.ids, dtype=torch.bool)
        self.prompt[:, : canvas.start - 1] = True  # its last token predicts the first of the answer

    def __call__(self, step: int, asked: list[int]) -> tuple[torch.Tensor, int]:
        variant, refresh = self.settings.variant, step % self.settings.refresh_interval == 0
        known = self.canvas.ids != self.canvas.network.mask_id
        if step == 0 or (variant == "decode" and refresh):
            answer = super().__call__(step, asked)
        elif variant == "prefill" or refresh:
            answer = self.feed(~self.prompt, asked)
        else:
            answer = self.feed(~self.cached, asked)
        self.cached = self.prompt if step == 0 else self.prompt | self.kept(known)
        return answer

    def kept(self, known: torch.Tensor) -> torch.Tensor:
        """(rows, P + R) which positions a forward leaves in the cache."""
        follows = known.roll(-1, dims=1)  # the first position stands in as the last one's successor
        if self.settings.shift_rule == "un":
            return follows
        both = known & follows
        both[:, -1] = both[:, -2]
        return both


class DKVCacheDreamDecoder(DreamDecoder):
    """dKV-Cache on Dream; ``settings``: :class:`DKVCacheDreamSettings`."""

    def forward(self, canvas: Canvas) -> DreamForward:
        return DreamForward(canvas, self.settings)
