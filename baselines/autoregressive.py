"""Greedy autoregressive decoding with a cache: one token per forward, through the same ``Network``."""

from __future__ import annotations

import torch

from backbone.network import Network
from backbone.selection import check_request
from backbone.trace import Recorder, Trace


class AutoregressiveDecoder:
    """Greedy decoding; stops at the first end token."""

    def __init__(self, network: Network) -> None:
        if not network.shift:
            raise ValueError("autoregressive decoding needs a network that predicts the next token (shift: true)")
        self.network = network

    @torch.inference_mode()
    def decode(self, prompt: torch.Tensor, max_new_tokens: int) -> Trace:
        """Decode ``prompt`` (P,) int64 into at most ``max_new_tokens`` tokens."""
        network = self.network
        check_request(network, prompt, max_new_tokens)
        recorder, start = Recorder(network.device), len(prompt)
        cache = network.cache(1, start + max_new_tokens)
        ids, fed, answer = prompt[None].to(network.device), slice(0, start), []
        causal = torch.full((start, start), float("-inf"), device=network.device, dtype=network.dtype).triu_(1)
        mask: torch.Tensor | None = causal
        for position in range(start, start + max_new_tokens):
            logits = network.predict(ids, fed, slice(position, position + 1), cache, position, mask)  # (1, 1, V)
            ids = logits[0].argmax(dim=-1, keepdim=True)  # (1, 1)
            answer.append(int(ids))
            recorder.step(fed.stop - fed.start, position, [position], answer[-1:], prefill=position == start)
            if answer[-1] in network.end_ids:
                break
            fed, mask = slice(position, position + 1), None
        return recorder.trace(start, max_new_tokens, 0, answer)
