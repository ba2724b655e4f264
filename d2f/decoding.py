"""The pipelined D2F decoder (arXiv:2508.09192, Algorithm 2), with an exact cache.

Blocks are decoded in parallel, each starting before those in front of it are done:

- a new block is appended when the last one is decoded to a share of ``tau_add`` (one per pass);
- a block is *fully activated* once its predecessor is decoded to ``tau_act``; until then it is
  *semi-activated*;
- every active block commits its tokens with confidence above ``tau_conf``; a fully activated block that
  has none commits its best one, so each pass commits something;
- a block without masks, all blocks before it being finished too, is fed once more with its final tokens,
  and the keys and values of that pass are kept. So the cache is exact: it equals recomputing everything.

``tau_add = 1`` decodes block after block (no pipeline); with ``tau_conf = 1`` as well it commits exactly
one token per pass. Order of events as in the authors' code, which decides activation before the forward.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from backbone.network import Network
from backbone.sampling import MEASURES, Sampling, predictions, uniforms
from backbone.selection import (
    END_RULES,
    above,
    check_choice,
    check_request,
    check_size,
    check_threshold,
    most_confident,
)
from backbone.trace import DONE, FULL, SEMI, Recorder, Trace
from d2f.blocks import additive_visibility


@dataclass(frozen=True)
class D2FSettings:
    """Settings of the decoder; paper defaults.

    Args:
        block_size: B.
        tau_add: decoded share of the last block needed to append the next one.
        tau_act: decoded share of the predecessor needed to become fully activated.
        tau_conf: confidence above which (strictly) a token is committed.
        after_eos: ``stop`` as soon as an end token is committed and nothing before it is masked, or
            ``finish`` every active block, as the authors' code does.
        ragged_tail: ``emit`` a shorter last block when B does not divide the length, or ``floor`` the
            length to whole blocks, as the authors' code does.
        fallback: by which measure a fully activated block without a confident token chooses its one:
            ``probability``, ``margin`` or ``entropy``. The threshold always reads the probability.
        temperature, top_p, top_k, confidence_dtype: see :class:`backbone.sampling.Sampling`.
        seed: of the sampling, when the temperature is above 0.
    """

    block_size: int = 16
    tau_add: float = 0.1
    tau_act: float = 0.95
    tau_conf: float = 0.9
    after_eos: str = "stop"
    ragged_tail: str = "emit"
    fallback: str = "probability"
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    confidence_dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        check_size("block_size", self.block_size)
        for name in ("tau_add", "tau_act", "tau_conf"):
            check_threshold(name, getattr(self, name))
        check_choice("after_eos", self.after_eos, END_RULES)
        check_choice("ragged_tail", self.ragged_tail, ("emit", "floor"))
        check_choice("fallback", self.fallback, MEASURES)
        self.sampling()

    def sampling(self, measure: str = "probability") -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, measure, self.confidence_dtype)


class Block:
    """A block of the answer: where it is, what is still masked, whether it is fully activated."""

    __slots__ = ("full", "masked", "number", "size", "stop")

    def __init__(self, number: int, start: int, stop: int, full: bool) -> None:
        self.number, self.stop, self.size, self.full = number, stop, stop - start, full
        self.masked = list(range(start, stop))

    @property
    def ratio(self) -> float:
        """Decoded share."""
        return (self.size - len(self.masked)) / self.size

    @property
    def state(self) -> str:
        return DONE if not self.masked else FULL if self.full else SEMI


class Pipeline:
    """The state machine of one decode, without any network: blocks appended, activated, filled, retired.

    Args:
        start: prompt length P.
        length: answer length.
        network: for its mask id and end ids.
        settings: see :class:`D2FSettings`.
    """

    def __init__(self, start: int, length: int, network: Network, settings: D2FSettings) -> None:
        self.start, self.end, self.settings = start, start + length, settings
        self.end_ids = network.end_ids
        self.answer = [network.mask_id] * length
        self.live: list[Block] = []  # blocks that are not cached yet, front to back
        self.cached = 0  # positions whose keys and values are final
        self.stop = start  # where the last block ends
        self.end_at = self.end  # position of the first end token

    def advance(self) -> list[int]:
        """Append at most one block, activate, and return the masked positions (none: the decode is over)."""
        live, settings = self.live, self.settings
        room = self.stop < self.end and self.end_at == self.end
        if room and (not live or live[-1].ratio >= settings.tau_add):
            number = live[-1].number + 1 if live else 1
            # the prompt counts as a finished block 0, so the first block is fully activated at once
            live.append(Block(number, self.stop, min(self.stop + settings.block_size, self.end), full=not live))
            self.stop = live[-1].stop
        for ahead, block in itertools.pairwise(live):
            block.full = block.full or ahead.ratio >= settings.tau_act
        asked = [position for block in live for position in block.masked]
        over = settings.after_eos == "stop" and asked and asked[0] > self.end_at
        return [] if over else asked

    def retire(self) -> None:
        """After a forward: what was finished before it was fed clean, so its keys and values are final."""
        self.cached = max(self.cached, self.start)
        while not self.live[0].masked:
            self.cached = self.live.pop(0).stop

    def commit(self, positions: list[int], tokens: list[int]) -> None:
        """Write tokens; they are never revised."""
        gone = set(positions)
        for block in self.live:
            block.masked = [position for position in block.masked if position not in gone]
        for position, token in zip(positions, tokens, strict=True):
            self.answer[position - self.start] = token
            if token in self.end_ids:
                self.end_at = min(self.end_at, position)

    def result(self) -> list[int]:
        """The answer; with ``after_eos: stop`` up to its first end token."""
        last = min(self.stop, self.end_at + 1) if self.settings.after_eos == "stop" else self.stop
        return self.answer[: last - self.start]


def choose(blocks: list[Block], confidences: list[float], order: list[float], tau_conf: float) -> list[int]:
    """Which of the asked positions to commit, as indices into ``confidences`` (block after block).

    A fully activated block without a confidence above ``tau_conf`` commits its highest in ``order``.
    """
    chosen, offset = [], 0
    for block in blocks:
        own = confidences[offset : offset + len(block.masked)]
        picked = above(own, tau_conf)
        if not picked and block.full and own:
            picked = most_confident(order[offset : offset + len(own)], 1)
        chosen += [offset + i for i in picked]
        offset += len(own)
    return chosen


class D2FDecoder:
    """Decodes one prompt at a time with a block-causal ``network``.

    Args:
        network: a diffusion network (its mask id is set).
        settings: see :class:`D2FSettings`.
        watch: called after every step with (answer so far, live blocks as ``(number, state)``).
    """

    def __init__(self, network: Network, settings: D2FSettings, watch=None) -> None:
        if network.mask_id is None:
            raise ValueError("D2F needs a diffusion network, but this one has no mask id")
        self.network, self.settings, self.watch = network, settings, watch

    @torch.inference_mode()
    def decode(self, prompt: torch.Tensor, max_new_tokens: int) -> Trace:
        """Decode ``prompt`` (P,) int64 into at most ``max_new_tokens`` tokens."""
        network, settings = self.network, self.settings
        check_request(network, prompt, max_new_tokens)
        recorder, start, length = Recorder(network.device), len(prompt), max_new_tokens
        if settings.ragged_tail == "floor":
            length -= length % settings.block_size
        pipeline = Pipeline(start, length, network, settings)
        canvas = torch.cat([prompt, prompt.new_tensor(pipeline.answer)])[None].to(network.device)  # (1, P + length)
        cache = network.cache(1, pipeline.end)
        visibility = additive_visibility(
            start, pipeline.end, settings.block_size, device=network.device, dtype=network.dtype
        )
        draw = uniforms(settings.seed, network.device)
        while asked := pipeline.advance():
            cached, stop, live = pipeline.cached, pipeline.stop, pipeline.live
            alone = len(live) == 1 and cached >= start  # then everything fed sees everything
            logits = network.predict(
                canvas[:, cached:stop],
                slice(cached, stop),
                torch.tensor(asked, device=network.device),
                cache,
                stop,
                None if alone else visibility[cached:stop, :stop],
            )
            tokens, confidences, order = self.read(logits, draw)
            states = [(block.number, block.state) for block in live]
            pipeline.retire()
            chosen = choose(live, confidences, order, settings.tau_conf)
            positions, committed = [asked[i] for i in chosen], [tokens[i] for i in chosen]
            pipeline.commit(positions, committed)
            canvas[0, start:] = torch.tensor(pipeline.answer, device=network.device)
            recorder.step(
                stop - cached,
                stop,
                positions,
                committed,
                confidences=[confidences[i] for i in chosen],
                blocks=states,
                prefill=cached == 0,
            )
            if self.watch:
                self.watch(pipeline.answer, states)
        return recorder.trace(start, max_new_tokens, settings.block_size, pipeline.result())

    def read(self, logits: torch.Tensor, draw) -> tuple[list[int], list[float], list[float]]:
        """Token, probability and fallback measure of each asked position, from logits (1, A, V)."""
        settings, mask_id = self.settings, self.network.mask_id
        tokens, confidences = (values[0].tolist() for values in predictions(logits, mask_id, settings.sampling(), draw))
        if settings.fallback == "probability":
            return tokens, confidences, confidences
        return (
            tokens,
            confidences,
            predictions(logits, mask_id, settings.sampling(settings.fallback), draw)[1][0].tolist(),
        )
