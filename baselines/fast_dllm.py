"""Fast-dLLM (arXiv:2505.22618): a training-free cache and parallel decoding for LLaDA and Dream.

Each block begins with one forward over the whole canvas; after it, *prefix* feeds the block and everything
behind it and keeps what is before frozen, *dual* feeds the block alone and keeps the masked suffix frozen
too. The cache is approximate: what is frozen was computed with the block masked.

Dream's logits are shifted, so a block's first token is predicted by the row before the block, which is fed
by the full forward only: that forward commits it, whatever its confidence, and nothing else. Without a
cache Dream's version has no blocks: the whole answer, and a quota per step that grows by what was left over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backbone.sampling import Sampling, predictions
from backbone.selection import (
    END_RULES,
    best_and_at_least,
    check_choice,
    check_size,
    check_threshold,
    factor_rule,
    most_confident,
    quotas,
)
from baselines.canvas import Canvas, CanvasDecoder
from baselines.dream import committed_shares
from baselines.llada import steps_per_block

CACHES = ("none", "prefix", "dual")
RULES = ("threshold", "factor", "steps")
Select = Callable[[list[float]], list[int]]


@dataclass(frozen=True)
class FastDLLMSettings:
    """Settings; the public defaults.

    Args:
        cache: ``none``, ``prefix`` or ``dual``.
        block_length: of the answer.
        rule: ``threshold``, ``factor``, or ``steps`` (a fixed number of tokens per step).
        threshold: confidence from which a token is committed; the best is always.
        factor: commits the n best while (n + 1)(1 - c_n) is at most this.
        steps: forwards for the whole answer, for the rule ``steps`` and for Dream without a cache, whose
            quota per step is length / steps; 0 = one per token with ``steps``, one per 32 tokens else.
        after_eos: ``stop`` by the shared rule, or ``finish`` the canvas, as the public code does.
    """

    cache: str = "prefix"
    block_length: int = 32
    rule: str = "threshold"
    threshold: float = 0.9
    factor: float = 1.0
    steps: int = 0
    after_eos: str = "stop"
    seed = 0  # nothing is random: the public evaluation is greedy

    def __post_init__(self) -> None:
        check_choice("cache", self.cache, CACHES)
        check_choice("rule", self.rule, RULES)
        check_choice("after_eos", self.after_eos, END_RULES)
        check_threshold("threshold", self.threshold)
        check_size("block_length", self.block_length)
        check_size("steps", self.steps, 0)
        if not self.factor >= 0:
            raise ValueError(f"factor is {self.factor}: give a number of at least 0")


class FastDLLMDecoder(CanvasDecoder):
    """Fast-dLLM on a bidirectional diffusion network; ``settings``: :class:`FastDLLMSettings`."""

    def fill(self, canvas: Canvas) -> None:
        if not self.network.shift:
            return self.llada(canvas)
        if self.settings.rule == "factor":
            raise ValueError("rule is 'factor', which Fast-dLLM has for LLaDA only: choose threshold or steps")
        return self.dream_without_cache(canvas) if self.settings.cache == "none" else self.dream(canvas)

    def later(self, canvas: Canvas, begin: int, stop: int) -> slice:
        """What is fed after a block's full forward."""
        choices = {"none": canvas.everything, "prefix": slice(begin, canvas.end), "dual": slice(begin, stop)}
        return choices[self.settings.cache]

    def step(self, canvas: Canvas, fed: slice, asked: list[int], select: Select, measure: str = "probability") -> None:
        logits = canvas.predict(fed, asked)
        tokens, confidences = predictions(logits, self.network.mask_id, Sampling(measure=measure))
        canvas.commit(fed.stop - fed.start, asked, tokens, confidences, select)

    def selection(self) -> Select:
        settings = self.settings
        if settings.rule == "factor":
            return lambda c: factor_rule(c, settings.factor)
        return lambda c: best_and_at_least(c, settings.threshold)

    def best(self, count: int) -> Select:
        return lambda c: most_confident(c, count)

    def llada(self, canvas: Canvas) -> None:
        fixed = self.settings.rule == "steps"
        per_block = steps_per_block(canvas, self.settings.steps) if fixed else 0
        for begin, stop in canvas.blocks():
            counts = iter(quotas(stop - begin, per_block)) if fixed else None
            fed = canvas.everything
            while (asked := canvas.asked(begin, stop)) and not canvas.ended():
                self.step(canvas, fed, asked, self.best(next(counts)) if counts else self.selection())
                fed = self.later(canvas, begin, stop)

    def dream(self, canvas: Canvas) -> None:
        settings = self.settings
        per_block = steps_per_block(canvas, settings.steps) if settings.rule == "steps" else 0
        if per_block == 1:
            raise ValueError(
                "steps gives each block one step, but Dream's first step commits one token only: give at least two per block"
            )
        for begin, stop in canvas.blocks():
            if canvas.ended():
                return
            self.step(canvas, canvas.everything, [begin], lambda c: [0])
            shares = iter(committed_shares(per_block, 1e-3)[1:]) if per_block else None
            while (asked := canvas.asked(begin, stop)) and not canvas.ended():
                fed = self.later(canvas, begin, stop)
                if shares:
                    self.step(canvas, fed, asked, self.best(int(len(asked) * next(shares))), "entropy")
                else:
                    self.step(canvas, fed, asked, self.selection())

    def dream_without_cache(self, canvas: Canvas) -> None:
        settings, length = self.settings, canvas.end - canvas.start
        if settings.rule == "steps":
            raise ValueError("rule steps without a cache is Dream's own sampler: use decoder dream")
        steps = settings.steps or max(1, length // 32)
        if length % steps:
            raise ValueError(f"max_new_tokens {length} is not a multiple of steps {steps}: change one of them")
        step = 0
        while (asked := canvas.asked(canvas.start, canvas.end)) and not canvas.ended():
            step += 1
            allowed = min(step * length // steps, length)

            def select(confidences: list[float], allowed: int = allowed) -> list[int]:
                quota = allowed - (length - len(confidences))  # this step's share and what the last ones left over
                best = set(best_and_at_least(confidences, settings.threshold))
                return [i for i in most_confident(confidences, quota) if i in best]

            self.step(canvas, canvas.everything, asked, select)
