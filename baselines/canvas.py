"""What the full-attention diffusion samplers share: a canvas of prompt and masks, filled block by block."""

from __future__ import annotations

import torch

from backbone.network import Network
from backbone.selection import answer_length, check_request, predictions
from backbone.trace import Recorder, Trace


class Canvas:
    """The state of one decode of a bidirectional network: every position is there from the start.

    Args:
        network: a diffusion network.
        prompt: (P,) int64.
        max_new_tokens: length of the answer, all MASK at first.
        block_length: answers are decoded in blocks of this length, front to back.
    """

    def __init__(self, network: Network, prompt: torch.Tensor, max_new_tokens: int, block_length: int) -> None:
        if network.mask_id is None:
            raise ValueError("this sampler needs a diffusion network, but this one has no mask id")
        check_request(network, prompt, max_new_tokens)
        self.network, self.recorder = network, Recorder(network.device)
        self.start, self.end, self.block_length = len(prompt), len(prompt) + max_new_tokens, block_length
        self.answer = [network.mask_id] * max_new_tokens
        self.ids = torch.cat([prompt, prompt.new_tensor(self.answer)])[None].to(network.device)  # (1, P + R)
        self.cache = network.cache(1, self.end)

    def blocks(self) -> list[tuple[int, int]]:
        """(start, stop) of each block; the last may be shorter."""
        starts = range(self.start, self.end, self.block_length)
        return [(begin, min(begin + self.block_length, self.end)) for begin in starts]

    def masked(self, begin: int, stop: int) -> list[int]:
        """Positions of ``[begin, stop)`` that are still masked."""
        return [p for p in range(begin, stop) if self.answer[p - self.start] == self.network.mask_id]

    def step(self, fed: slice, asked: list[int], select) -> None:
        """Feed, predict the asked positions, commit those that ``select(confidences)`` names, and record.

        Everything fed sees every slot of the canvas, fresh or stale.
        """
        network, ask = self.network, torch.tensor(asked, device=self.network.device)
        logits = network.predict(self.ids[:, fed], fed, ask, self.cache, self.end)
        tokens, confidences = (values[0].tolist() for values in predictions(logits, network.mask_id))
        chosen = select(confidences)
        positions, committed = [asked[i] for i in chosen], [tokens[i] for i in chosen]
        for position, token in zip(positions, committed, strict=True):
            self.answer[position - self.start] = token
        self.ids[0, self.start :] = torch.tensor(self.answer, device=network.device)
        self.recorder.step(
            fed.stop - fed.start,
            self.end,
            positions,
            committed,
            confidences=[confidences[i] for i in chosen],
            prefill=not self.recorder.steps,
        )

    def ended(self, after_eos: str) -> bool:
        """The shared early-stop rule."""
        return after_eos == "stop" and answer_length(self.answer, self.network) is not None

    def trace(self, after_eos: str) -> Trace:
        length = answer_length(self.answer, self.network) if after_eos == "stop" else None
        tokens = self.answer if length is None else self.answer[:length]
        return self.recorder.trace(self.start, self.end - self.start, self.block_length, tokens)
