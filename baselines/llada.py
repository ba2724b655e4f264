"""Vanilla LLaDA sampler (arXiv:2502.09992): full recompute at every step, low-confidence remasking.

Block after block, each step commits a fixed number of tokens, the most confident ones of the block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backbone.network import Network
from backbone.selection import END_RULES, check_choice, most_confident, quotas
from backbone.trace import Trace
from baselines.canvas import Canvas


@dataclass(frozen=True)
class LLaDASettings:
    """Settings of the sampler.

    Args:
        steps: forwards for the whole answer; 0 = one per token, as in the D2F paper's rows.
        block_length: must divide the answer's length.
        after_eos: ``stop`` by the shared rule, or ``finish`` the whole canvas, as the paper's rows do.
    """

    steps: int = 0
    block_length: int = 32
    after_eos: str = "stop"

    def __post_init__(self) -> None:
        if self.steps < 0 or self.block_length < 1:
            raise ValueError(
                f"steps {self.steps}, block_length {self.block_length}: give steps >= 0, block_length >= 1"
            )
        check_choice("after_eos", self.after_eos, END_RULES)


class LLaDADecoder:
    """The vanilla sampler on a bidirectional diffusion network."""

    def __init__(self, network: Network, settings: LLaDASettings) -> None:
        self.network, self.settings = network, settings

    @torch.inference_mode()
    def decode(self, prompt: torch.Tensor, max_new_tokens: int) -> Trace:
        """Decode ``prompt`` (P,) int64 into ``max_new_tokens`` tokens."""
        settings = self.settings
        steps = settings.steps or max_new_tokens
        if max_new_tokens % settings.block_length:
            raise ValueError(
                f"max_new_tokens {max_new_tokens} is not a multiple of block_length {settings.block_length}, "
                "which LLaDA's sampler needs: change one of them"
            )
        canvas = Canvas(self.network, prompt, max_new_tokens, settings.block_length)
        blocks = canvas.blocks()
        if steps % len(blocks):
            raise ValueError(
                f"steps {steps} is not a multiple of the {len(blocks)} blocks: change steps or block_length"
            )
        everything = slice(0, canvas.end)
        for begin, stop in blocks:
            for quota in quotas(stop - begin, steps // len(blocks)):
                if quota == 0 or canvas.ended(settings.after_eos):
                    continue
                canvas.step(everything, canvas.masked(begin, stop), lambda c, n=quota: most_confident(c, n))
        return canvas.trace(settings.after_eos)
