"""Fast-dLLM (arXiv:2505.22618): a training-free cache and confidence-threshold decoding for LLaDA.

Each block begins with one forward over the whole canvas, which also commits; after it, *prefix* feeds the
block and everything behind it and keeps what is before frozen, *dual* feeds the block alone and keeps the
masked suffix frozen too. The cache is approximate: what is frozen was computed with the block masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backbone.network import Network
from backbone.selection import END_RULES, best_and_at_least, check_choice, check_threshold
from backbone.trace import Trace
from baselines.canvas import Canvas

CACHES = ("none", "prefix", "dual")


@dataclass(frozen=True)
class FastDLLMSettings:
    """Settings; the public defaults.

    Args:
        cache: ``none``, ``prefix`` or ``dual``.
        block_length: of the answer.
        threshold: confidence from which a token is committed; the best is always.
        after_eos: ``stop`` by the shared rule, or ``finish`` the canvas, as the public code does.
    """

    cache: str = "prefix"
    block_length: int = 32
    threshold: float = 0.9
    after_eos: str = "stop"

    def __post_init__(self) -> None:
        check_choice("cache", self.cache, CACHES)
        check_choice("after_eos", self.after_eos, END_RULES)
        check_threshold("threshold", self.threshold)
        if self.block_length < 1:
            raise ValueError(f"block_length is {self.block_length}: give a whole number of at least 1")


class FastDLLMDecoder:
    """Fast-dLLM on a bidirectional diffusion network."""

    def __init__(self, network: Network, settings: FastDLLMSettings) -> None:
        self.network, self.settings = network, settings

    @torch.inference_mode()
    def decode(self, prompt: torch.Tensor, max_new_tokens: int) -> Trace:
        """Decode ``prompt`` (P,) int64 into ``max_new_tokens`` tokens."""
        settings = self.settings
        canvas = Canvas(self.network, prompt, max_new_tokens, settings.block_length)
        for begin, stop in canvas.blocks():
            if canvas.ended(settings.after_eos):
                break
            everything = slice(0, canvas.end)
            later = {"none": everything, "prefix": slice(begin, canvas.end), "dual": slice(begin, stop)}
            fed = everything
            while (asked := canvas.masked(begin, stop)) and not canvas.ended(settings.after_eos):
                canvas.step(fed, asked, lambda confidences: best_and_at_least(confidences, settings.threshold))
                fed = later[settings.cache]
        return canvas.trace(settings.after_eos)
