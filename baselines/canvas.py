"""What the full-attention diffusion samplers share: a canvas of prompt and masks that is filled step by step.

A sampler is two choices per step, which tokens to commit and (its cache policy) which positions to feed;
everything fed sees every slot of the canvas, fresh or stale. Rows of one canvas go in lockstep: one forward
for all, and each commits its own tokens.
"""

from __future__ import annotations

import torch

from backbone.cache import Positions
from backbone.network import Network
from backbone.sampling import Uniforms, uniforms
from backbone.selection import answer_length, check_request
from backbone.trace import Recorder, Trace


class Canvas:
    """The state of one decode of a bidirectional network: every position is there from the start.

    Args:
        network: a diffusion network.
        prompts: (rows, P) int64.
        max_new_tokens: length R of the answers, all MASK at first.
        block_length: answers are decoded in blocks of this length, front to back; 0 = the answer is one block.
        after_eos: ``stop`` by the shared rule (:func:`backbone.selection.answer_length`) or ``finish``.
        seed: of everything random in this decode.
    """

    def __init__(
        self,
        network: Network,
        prompts: torch.Tensor,
        max_new_tokens: int,
        block_length: int,
        after_eos: str,
        seed: int = 0,
    ) -> None:
        if network.mask_id is None:
            raise ValueError("this sampler needs a diffusion network, but this one has no mask id")
        check_request(network, prompts, max_new_tokens)
        self.network, self.after_eos, self.block_length = network, after_eos, block_length
        self.rows, self.start = prompts.shape
        self.end = self.start + max_new_tokens
        self.recorder = Recorder(network.device, self.rows)
        self.answers = [[network.mask_id] * max_new_tokens for _ in range(self.rows)]
        self.ids = torch.cat([prompts, prompts.new_tensor(self.answers)], dim=1).to(network.device)  # (rows, P + R)
        self.cache = network.cache(self.rows, self.end)
        self.draw: Uniforms = uniforms(seed, network.device)

    @property
    def everything(self) -> slice:
        return slice(0, self.end)

    def blocks(self) -> list[tuple[int, int]]:
        """(start, stop) of each block; the last may be shorter."""
        length = self.block_length or self.end - self.start
        return [(begin, min(begin + length, self.end)) for begin in range(self.start, self.end, length)]

    def masked(self, row: int, begin: int, stop: int) -> list[int]:
        """Positions of ``[begin, stop)`` that are still masked in a row."""
        answer, start, mask_id = self.answers[row], self.start, self.network.mask_id
        return [p for p in range(begin, stop) if answer[p - start] == mask_id]

    def asked(self, begin: int, stop: int) -> list[int]:
        """Positions of ``[begin, stop)`` that are still masked in some row."""
        return sorted(set().union(*(self.masked(row, begin, stop) for row in range(self.rows))))

    def predict(self, fed: Positions, asked: list[int]) -> torch.Tensor:
        """Logits (rows, A, V) of the asked positions after feeding ``fed``: a slice, or (rows, Q) positions."""
        ids = self.ids[:, fed] if isinstance(fed, slice) else self.ids.gather(1, fed)
        ask = torch.tensor(asked, dtype=torch.long, device=self.network.device)
        return self.network.predict(ids, fed, ask, self.cache, self.end)

    def commit(self, fed: int, asked: list[int], tokens: torch.Tensor, confidences: torch.Tensor, select) -> None:
        """Let ``select(confidences of a row's masked positions)`` name what each row commits, and record the step.

        Args:
            fed: how many positions of each row the forward was fed.
            asked: A positions, those masked in some row.
            tokens, confidences: (rows, A).
            select: returns indices; it is not called for rows that have nothing masked or have ended.
        """
        rows = [self._fill(row, asked, tokens[row], confidences[row], select) for row in range(self.rows)]
        self.ids[:, self.start :] = torch.tensor(self.answers, device=self.network.device)
        self.recorder.lockstep(fed, self.end, rows, prefill=not self.recorder.rows[0])

    def _fill(self, row: int, asked: list[int], tokens: torch.Tensor, confidences: torch.Tensor, select) -> dict:
        answer, start, mask_id = self.answers[row], self.start, self.network.mask_id
        own = [] if self.row_ended(row) else [i for i, p in enumerate(asked) if answer[p - start] == mask_id]
        values, found = confidences.tolist(), tokens.tolist()
        chosen = [own[i] for i in select([values[i] for i in own])] if own else []
        for i in chosen:
            answer[asked[i] - start] = found[i]
        return {
            "positions": [asked[i] for i in chosen],
            "tokens": [found[i] for i in chosen],
            "confidences": [values[i] for i in chosen],
        }

    def row_ended(self, row: int) -> bool:
        return self.after_eos == "stop" and answer_length(self.answers[row], self.network) is not None

    def ended(self) -> bool:
        """Whether all rows have ended by the shared early-stop rule."""
        return all(self.row_ended(row) for row in range(self.rows))

    def traces(self) -> list[Trace]:
        """The trace of each row."""
        made = []
        for row, answer in enumerate(self.answers):
            length = answer_length(answer, self.network) if self.after_eos == "stop" else None
            made.append(self.recorder.trace(self.start, self.end - self.start, self.block_length, answer[:length], row))
        return made


class CanvasDecoder:
    """A sampler over a :class:`Canvas`; a subclass says in ``fill`` how it is filled.

    ``settings`` has ``block_length``, ``after_eos`` and ``seed``. ``draw`` replaces the seeded source of
    randomness, for comparison with recorded draws.
    """

    draw: Uniforms | None = None

    def __init__(self, network: Network, settings) -> None:
        self.network, self.settings = network, settings

    def decode(self, prompt: torch.Tensor, max_new_tokens: int) -> Trace:
        """Decode ``prompt`` (P,) int64 into ``max_new_tokens`` tokens."""
        return self.decode_rows(prompt[None], max_new_tokens)[0]

    @torch.inference_mode()
    def decode_rows(self, prompts: torch.Tensor, max_new_tokens: int) -> list[Trace]:
        """Decode ``prompts`` (rows, P) int64 in lockstep: the trace of each row, whose forwards are shared."""
        settings = self.settings
        canvas = Canvas(self.network, prompts, max_new_tokens, settings.block_length, settings.after_eos, settings.seed)
        canvas.draw = self.draw or canvas.draw
        self.fill(canvas)
        return canvas.traces()

    def fill(self, canvas: Canvas) -> None:
        raise NotImplementedError
