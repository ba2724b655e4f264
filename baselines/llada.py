"""Vanilla LLaDA sampler (arXiv:2502.09992; ``generate.py``): full recompute at every step, block after block.

Each step commits a fixed number of tokens of the block, the most confident ones (``low_confidence``
remasking) or random ones. With guidance the same canvas is read a second time with its prompt masked, in
the same forward, and the logits are pushed away from what that half says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backbone.sampling import llada_predictions
from backbone.selection import END_RULES, check_choice, check_size, most_confident, quotas
from baselines.canvas import Canvas, CanvasDecoder

REMASKING = ("low_confidence", "random")


@dataclass(frozen=True)
class LLaDASettings:
    """Settings of the sampler.

    Args:
        steps: forwards for the whole answer; 0 = one per token, as in the D2F paper's rows.
        block_length: must divide the answer's length.
        remasking: which tokens of a step stay: ``low_confidence`` remasks the least sure, or ``random``.
        temperature: of the Gumbel noise; 0 = greedy.
        guidance: scale of classifier-free guidance; 0 = none.
        logits_eos_inf: never predict an end token.
        confidence_eos_eot_inf: fill positions that predict an end token (or a turn's end) last.
        turn_end_ids: the ids that end a turn, for ``confidence_eos_eot_inf`` (LLaDA: 126348).
        after_eos: ``stop`` by the shared rule, or ``finish`` the whole canvas, as the paper's rows do.
        seed: of the noise and of random remasking.
    """

    steps: int = 0
    block_length: int = 32
    remasking: str = "low_confidence"
    temperature: float = 0.0
    guidance: float = 0.0
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    turn_end_ids: tuple[int, ...] = ()
    after_eos: str = "stop"
    seed: int = 0

    def __post_init__(self) -> None:
        check_size("steps", self.steps, 0)
        check_size("block_length", self.block_length)
        check_choice("remasking", self.remasking, REMASKING)
        check_choice("after_eos", self.after_eos, END_RULES)
        for name in ("temperature", "guidance"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number of at least 0")


def steps_per_block(canvas: Canvas, steps: int) -> int:
    """How many steps each block gets, or one line on why that is no whole number."""
    length, blocks = canvas.end - canvas.start, len(canvas.blocks())
    if length % canvas.block_length:
        raise ValueError(
            f"max_new_tokens {length} is not a multiple of block_length {canvas.block_length}, "
            "which LLaDA's sampler needs: change one of them"
        )
    if (steps or length) % blocks:
        raise ValueError(f"steps {steps} is not a multiple of the {blocks} blocks: change steps or block_length")
    return (steps or length) // blocks


class FullForward:
    """Recompute everything at every step."""

    def __init__(self, canvas: Canvas) -> None:
        self.canvas = canvas

    def __call__(self, step: int, asked: list[int]) -> tuple[torch.Tensor, int]:
        """Logits (rows, A, V) of the asked positions, and how many positions of each row were fed.

        ``step`` counts from 0 within the block.
        """
        return self.canvas.predict(self.canvas.everything, asked), self.canvas.end


class GuidedForward:
    """Classifier-free guidance: u + (s + 1)(c - u), with the prompt masked for u; both halves in one forward."""

    def __init__(self, canvas: Canvas, scale: float) -> None:
        self.canvas, self.scale = canvas, scale
        self.cache = canvas.network.cache(2 * canvas.rows, canvas.end)

    def __call__(self, step: int, asked: list[int]) -> tuple[torch.Tensor, int]:
        canvas, network = self.canvas, self.canvas.network
        blind = canvas.ids.clone()
        blind[:, : canvas.start] = network.mask_id
        ask = torch.tensor(asked, dtype=torch.long, device=network.device)
        both = torch.cat([canvas.ids, blind])  # (2 x rows, P + R)
        logits = network.predict(both, canvas.everything, ask, self.cache, canvas.end)
        conditional, free = logits.chunk(2)
        return free + (self.scale + 1) * (conditional - free), 2 * canvas.end


class LLaDADecoder(CanvasDecoder):
    """The vanilla sampler on a bidirectional diffusion network; ``settings``: :class:`LLaDASettings`."""

    def forward(self, canvas: Canvas):
        """How a step gets its logits; a cache policy replaces this."""
        guidance = self.settings.guidance
        return GuidedForward(canvas, guidance) if guidance else FullForward(canvas)

    def fill(self, canvas: Canvas) -> None:
        per_block = steps_per_block(canvas, self.settings.steps)
        forward = self.forward(canvas)
        for begin, stop in canvas.blocks():
            for step, quota in enumerate(quotas(stop - begin, per_block)):
                if canvas.ended():
                    return
                asked = canvas.asked(begin, stop)
                logits, fed = forward(step, asked)
                tokens, confidences = self.read(canvas, logits)
                canvas.commit(fed, asked, tokens, confidences, lambda c, n=quota: most_confident(c, n))

    def read(self, canvas: Canvas, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and confidences (rows, A)."""
        settings, ends = self.settings, self.network.end_ids
        never = ends if settings.logits_eos_inf else ()
        last = (*ends, *settings.turn_end_ids) if settings.confidence_eos_eot_inf else ()
        tokens, confidences = llada_predictions(
            logits, self.network.mask_id, settings.temperature, canvas.draw, never, last
        )
        return tokens, canvas.draw(*tokens.shape) if settings.remasking == "random" else confidences
