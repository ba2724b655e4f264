"""Vanilla Dream sampler (``diffusion_generate``): full recompute, no blocks, a schedule over the whole answer.

Time runs from 1 to ``eps`` in ``steps`` equal steps; a step from t to s commits a share 1 - s/t of what is
masked, the last step all of it. The count is rounded down, so with one step per token the first step may
commit nothing and the last two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from backbone.sampling import Sampling, predictions
from backbone.selection import END_RULES, check_choice, check_size, most_confident
from baselines.canvas import Canvas, CanvasDecoder
from baselines.llada import FullForward

ALGORITHMS = {"origin": "probability", "maskgit_plus": "probability", "topk_margin": "margin", "entropy": "entropy"}


@dataclass(frozen=True)
class DreamSettings:
    """Settings; the public defaults, but no hidden top-k (old transformers filled in 50).

    Args:
        steps: forwards for the whole answer; 0 = one per token.
        algorithm: ``origin`` commits each masked token with probability 1 - s/t; the others the most
            confident ones by probability (``maskgit_plus``), ``topk_margin`` or ``entropy``.
        eps: where time ends.
        temperature, top_p, top_k: of the tokens.
        order_temperature: above 0, positions are drawn from softmax(confidence / this) (``alg_temp``).
        after_eos: ``stop`` by the shared rule, or ``finish``, as the public code does.
        seed: of everything random.
    """

    steps: int = 0
    algorithm: str = "entropy"
    eps: float = 1e-3
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    order_temperature: float = 0.0
    after_eos: str = "stop"
    seed: int = 0
    block_length = 0  # no blocks

    def __post_init__(self) -> None:
        check_size("steps", self.steps, 0)
        check_choice("algorithm", self.algorithm, tuple(ALGORITHMS))
        check_choice("after_eos", self.after_eos, END_RULES)
        if not 0 < self.eps < 1:
            raise ValueError(f"eps is {self.eps}: give a number between 0 and 1")
        if not self.order_temperature >= 0:
            raise ValueError(f"order_temperature is {self.order_temperature}: give a number of at least 0")
        self.sampling()

    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, ALGORITHMS[self.algorithm])


def committed_shares(steps: int, eps: float) -> torch.Tensor:
    """(steps,) float32 shares 1 - s/t of the masked tokens that each step commits; the last commits all."""
    times = torch.linspace(1, eps, steps + 1)
    shares = 1 - times[1:] / times[:-1]
    shares[-1] = 1
    return shares


class DreamDecoder(CanvasDecoder):
    """The vanilla sampler on a bidirectional diffusion network; ``settings``: :class:`DreamSettings`."""

    def forward(self, canvas: Canvas):
        """How a step gets its logits; a cache policy replaces this."""
        return FullForward(canvas)

    def fill(self, canvas: Canvas) -> None:
        settings, forward = self.settings, self.forward(canvas)
        steps = settings.steps or canvas.end - canvas.start
        for step, share in enumerate(committed_shares(steps, settings.eps)):
            if canvas.ended():
                return
            asked = canvas.asked(canvas.start, canvas.end)
            logits, fed = forward(step, asked)
            tokens, confidences = predictions(logits, self.network.mask_id, settings.sampling(), canvas.draw)
            canvas.commit(fed, asked, tokens, confidences, self.selection(canvas, share))

    def selection(self, canvas: Canvas, share: torch.Tensor) -> Callable[[list[float]], list[int]]:
        """Which positions of a row to commit at a step."""
        if self.settings.algorithm == "origin":
            return lambda c: (canvas.draw(len(c)) < share).nonzero()[:, 0].tolist()
        masked = sum(len(canvas.masked(row, canvas.start, canvas.end)) for row in range(canvas.rows))
        count = int(masked / canvas.rows * share)  # float32, as the public code counts
        heat = self.settings.order_temperature
        return (lambda c: most_confident(c, count)) if not heat else (lambda c: drawn(c, count, heat, canvas.draw))


def drawn(confidences: list[float], count: int, heat: float, draw) -> list[int]:
    """``count`` indices drawn without replacement from softmax(confidence / heat), by the Gumbel trick."""
    scores = torch.tensor(confidences, dtype=torch.float64) / heat - torch.log(-torch.log(draw(len(confidences)).cpu()))
    return sorted(scores.topk(min(count, len(confidences))).indices.tolist())
