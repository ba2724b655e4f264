"""dLLM-Cache (arXiv:2506.06295): keep each layer's features, refresh the prompt's seldom and the answer's often.

Per layer the keys and values, the attention's output and the MLP's output of every position are kept.
Every ``prompt_interval`` forwards the prompt's are recomputed, every ``response_interval`` the answer's; in
between, only the share ``transfer_ratio`` of the answer whose *values* changed most since the last forward
(lowest cosine similarity, over all heads together) is recomputed, and all others reuse their outputs. The
first layer is recomputed whole at every forward (public code; not in the paper). Any sampler can stand on
top; the counter runs over the whole answer, whatever its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from backbone.inference import LeanForward
from backbone.network import shifted
from backbone.selection import check_size, check_threshold
from baselines.canvas import Canvas
from baselines.dream import DreamDecoder, DreamSettings
from baselines.llada import LLaDADecoder, LLaDASettings

EARLY_GUIDANCE = 5  # the public code refreshes the guidance at each of the first five steps


@dataclass(frozen=True)
class Intervals:
    """When what is refreshed, in forwards; see the module's text."""

    prompt_interval: int = 50
    response_interval: int = 7
    transfer_ratio: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("prompt_interval", self.prompt_interval)
        check_size("response_interval", self.response_interval)
        check_threshold("transfer_ratio", self.transfer_ratio)


@dataclass(frozen=True)
class DLLMCacheSettings(Intervals, LLaDASettings):
    """Settings for LLaDA; ``guidance_interval``: steps between forwards of the prompt-less half."""

    guidance_interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("guidance_interval", self.guidance_interval)


@dataclass(frozen=True)
class DLLMCacheDreamSettings(Intervals, DreamSettings):
    """Settings for Dream."""


class Features:
    """The kept features of one stream of forwards over one canvas, and the forward that maintains them."""

    def __init__(self, canvas: Canvas, settings: Intervals, watch=None) -> None:
        network = canvas.network
        if not isinstance(network.run, LeanForward):
            raise ValueError(
                "dLLM-Cache chooses what to recompute per layer, which transformers' modules cannot: use forward lean"
            )
        self.lean, self.network, self.settings, self.watch = network.run, network, settings, watch
        self.start, self.shape = canvas.start, (canvas.rows, canvas.end)
        self.cache = network.cache(canvas.rows, canvas.end)
        width = network.module.config.hidden_size
        like = {"dtype": network.dtype, "device": network.device}
        layers = len(self.lean.layers)
        self.attended = [torch.zeros(*self.shape, width, **like) for _ in range(layers)]
        self.fed_forward = [torch.zeros(*self.shape, width, **like) for _ in range(layers)]
        self.everything = torch.arange(canvas.end, device=network.device).expand(self.shape)  # (rows, P + R)
        self.calls = self.recomputed = 0

    def logits(self, ids: torch.Tensor, asked: list[int]) -> tuple[torch.Tensor, int]:
        """Logits (rows, A, V) of the asked positions of ``ids`` (rows, P + R), and positions recomputed per layer."""
        module, lean = self.network.module, self.lean
        self.calls, self.recomputed = self.calls + 1, 0
        x = F.embedding(ids, module.model.embed_tokens.weight)  # (rows, P + R, D)
        for number in range(len(lean.layers)):
            x = self.layer(number, x)
        ask = torch.tensor(asked, dtype=torch.long, device=self.network.device)
        hidden = x[:, shifted(ask, int(self.network.shift))]
        hidden = F.rms_norm(hidden, lean.width, module.model.norm.weight, lean.epsilon)
        fed = round(self.recomputed / len(lean.layers))
        return self.network.logits(hidden, fed), fed

    def layer(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """One layer on all positions ``x`` (rows, P + R, D); only :meth:`due` ones are recomputed."""
        lean, layer, attended, fed_forward = (
            self.lean,
            self.lean.layers[number],
            self.attended[number],
            self.fed_forward[number],
        )
        fed = self.due(number, x)  # (rows, n)
        rows, count = fed.shape
        self.recomputed += count
        if count:
            cos, sin = lean.rotations(fed, self.shape[1])
            queries, states = lean.project(layer, taken(x, fed), rows, cos, sin)
            self.cache.write(number, fed, states)
            keys, values = self.cache.seen(number, self.shape[1])
            nothing = torch.zeros_like(taken(x, fed))
            self.keep(attended, fed, lean.attend(layer, nothing, queries, keys, values, None))
        x = x + attended
        if count:
            self.keep(fed_forward, fed, lean.feed_forward(layer, taken(x, fed), nothing))
        return x + fed_forward

    def due(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """(rows, n) positions that a layer recomputes at this call; renews all values of a partial answer."""
        settings, start = self.settings, self.start
        prompt = (self.calls - 1) % settings.prompt_interval == 0
        response = (self.calls - 1) % settings.response_interval == 0
        if number == 0 or (prompt and response):
            return self.everything
        fed = [self.everything[:, :start]] if prompt else []
        if response:
            fed.append(self.everything[:, start:])
        elif settings.transfer_ratio:
            fed.append(start + self.changed(number, x[:, start:]))
        return torch.cat(fed, dim=1) if fed else self.everything[:, :0]

    def changed(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """(rows, n) places in the answer whose values changed most; stores the new values of the whole answer."""
        layer, kv_heads = self.lean.layers[number], self.lean.kv_heads
        rows, length, _ = x.shape
        size = kv_heads * self.lean.head_dim
        normed = F.rms_norm(x, self.lean.width, layer["attention_norm"], self.lean.epsilon)
        bias = None if layer["qkv_bias"] is None else layer["qkv_bias"][-size:]
        values = F.linear(normed, layer["qkv"][-size:], bias)  # (rows, R, kv_heads * d)
        kept = self.cache.states[number][:, kv_heads:, self.start :]  # (rows, kv_heads, R, d), a view
        similarity = F.cosine_similarity(values, kept.transpose(1, 2).reshape(rows, length, size), dim=-1)
        kept.copy_(values.view(rows, length, kv_heads, -1).transpose(1, 2))
        count = int(self.settings.transfer_ratio * length)
        places = similarity.topk(count, dim=1, largest=False).indices.sort(dim=1).values
        if self.watch:
            self.watch(self.calls, number, places)
        return places

    def keep(self, features: torch.Tensor, fed: torch.Tensor, new: torch.Tensor) -> None:
        """Store ``new`` (rows * n, D) of the fed positions."""
        index = fed[..., None].expand(-1, -1, features.shape[-1])
        features.scatter_(1, index, new.view(index.shape))


def taken(x: torch.Tensor, fed: torch.Tensor) -> torch.Tensor:
    """(rows * n, D) of ``x`` (rows, P + R, D) at the fed positions (rows, n)."""
    return x.gather(1, fed[..., None].expand(-1, -1, x.shape[-1])).flatten(0, 1)


class CachedForward:
    """One stream of forwards; with guidance a second one, of the canvas with its prompt masked."""

    def __init__(self, canvas: Canvas, settings: Intervals, watch=None) -> None:
        self.canvas, self.settings = canvas, settings
        self.scale = getattr(settings, "guidance", 0.0)
        self.stream = Features(canvas, settings, watch)
        self.blind = Features(canvas, settings) if self.scale else None
        self.steps = 0

    def __call__(self, step: int, asked: list[int]) -> tuple[torch.Tensor, int]:
        """Logits (rows, A, V) of the asked positions, and how many positions were recomputed per layer."""
        canvas = self.canvas
        self.steps += 1
        if not self.blind:
            return self.stream.logits(canvas.ids, asked)
        answer = list(range(canvas.start, canvas.end))
        logits, fed = self.stream.logits(canvas.ids, answer)
        if self.steps <= EARLY_GUIDANCE or (self.steps - 1) % self.settings.guidance_interval == 0:
            ids = canvas.ids.clone()
            ids[:, : canvas.start] = canvas.network.mask_id
            free, more = self.blind.logits(ids, answer)
            self.residual, fed = logits - free, fed + more
        logits = logits + self.settings.guidance * self.residual
        return logits[:, [position - canvas.start for position in asked]], fed


class DLLMCacheDecoder(LLaDADecoder):
    """dLLM-Cache on LLaDA; ``settings``: :class:`DLLMCacheSettings`."""

    watch = None  # called with (forward, layer, places (rows, n)) at every partial update

    def forward(self, canvas: Canvas) -> CachedForward:
        return CachedForward(canvas, self.settings, self.watch)


class DLLMCacheDreamDecoder(DreamDecoder):
    """dLLM-Cache on Dream; ``settings``: :class:`DLLMCacheDreamSettings`."""

    watch = None

    def forward(self, canvas: Canvas) -> CachedForward:
        return CachedForward(canvas, self.settings, self.watch)
