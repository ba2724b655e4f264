"""From logits to a token and a confidence for each asked position; one implementation for every system.

MASK is never a legal prediction: its logit is removed before anything else (a model that prefers it would
otherwise spin without committing). At temperature 0 the token is the argmax. Above it there are two
public ways, equal in distribution and both kept because a benchmark must do what its baselines do:
LLaDA perturbs the logits with Gumbel noise and reads the confidence from the *unperturbed* ones
(``generate.py``), Dream draws from the tempered, filtered distribution and reads the confidence there
(``generation_utils.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

MEASURES = ("probability", "margin", "entropy")
Uniforms = Callable[..., torch.Tensor]  # sizes -> numbers in [0, 1), float64


@dataclass(frozen=True)
class Sampling:
    """How tokens and confidences are read off.

    Args:
        temperature: 0 = greedy.
        top_p: keep the smallest set of tokens whose probability exceeds this (the crossing one stays).
        top_k: keep this many tokens. Dream's old ``transformers`` silently used 50; here nothing is implied.
        measure: ``probability`` of the token, ``margin`` of the best over the second, or negative ``entropy``.
        confidence_dtype: ``float32``, or ``logits`` to round as the network's own dtype does (bfloat16 on GPUs).
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    measure: str = "probability"
    confidence_dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}: give a number of at least 0")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: give a number above 0 and up to 1, or null")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: give a whole number of at least 1, or null")
        for name, allowed in (("measure", MEASURES), ("confidence_dtype", ("float32", "logits"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}: choose one of {', '.join(allowed)}")


GREEDY = Sampling()


def uniforms(seed: int, device: torch.device) -> Uniforms:
    """The source of all randomness of one decode, so that an answer never depends on the order of requests."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return lambda *sizes: torch.rand(*sizes, generator=generator, dtype=torch.float64, device=device)


def predictions(
    logits: torch.Tensor, mask_id: int, sampling: Sampling = GREEDY, draw: Uniforms | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and confidences, both (...,), of logits (..., V); Dream's way where the temperature is above 0."""
    logits = logits.float() if sampling.confidence_dtype == "float32" else logits.clone()
    logits[..., mask_id] = float("-inf")
    if sampling.temperature > 0:
        logits = logits / sampling.temperature
    logits = keep_top_k(keep_top_p(logits, sampling.top_p), sampling.top_k)
    probabilities = torch.softmax(logits, dim=-1)
    if sampling.temperature > 0:
        tokens = draw_tokens(probabilities, draw)
        confidences = probabilities.gather(-1, tokens[..., None])[..., 0]
    else:
        confidences, tokens = probabilities.max(dim=-1)
    if sampling.measure == "margin":
        best = probabilities.topk(2, dim=-1).values
        confidences = best[..., 0] - best[..., 1]
    elif sampling.measure == "entropy":
        confidences = (probabilities * torch.log(probabilities + 1e-10)).sum(-1)
    return tokens, confidences


def draw_tokens(probabilities: torch.Tensor, draw: Uniforms) -> torch.Tensor:
    """One token (...,) per distribution (..., V), by inverting its cumulative sum."""
    steps = probabilities.double().cumsum(-1)
    point = draw(*probabilities.shape[:-1])[..., None] * steps[..., -1:]
    return torch.searchsorted(steps, point, right=True)[..., 0].clamp(max=probabilities.shape[-1] - 1)


def keep_top_p(logits: torch.Tensor, top_p: float | None) -> torch.Tensor:
    """Logits with everything behind the nucleus at -inf; the token that crosses ``top_p`` stays."""
    if top_p is None or top_p >= 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    before = torch.softmax(ordered, dim=-1).cumsum(-1).roll(1, dims=-1)
    before[..., 0] = 0
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before > top_p)
    return logits.masked_fill(dropped, float("-inf"))


def keep_top_k(logits: torch.Tensor, top_k: int | None) -> torch.Tensor:
    """Logits with everything below the ``top_k``-th at -inf."""
    if top_k is None or top_k >= logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[..., -1:], float("-inf"))


def gumbel(logits: torch.Tensor, temperature: float, noise: torch.Tensor) -> torch.Tensor:
    """LLaDA's perturbed scores, float64: exp(logits) / (-log u) ** temperature, with u uniform, same shape."""
    return logits.double().exp() / (-torch.log(noise)) ** temperature


def llada_predictions(
    logits: torch.Tensor,
    mask_id: int,
    temperature: float,
    draw: Uniforms,
    never: tuple[int, ...] = (),
    last: tuple[int, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and confidences, both (...,), of logits (..., V) in LLaDA's way.

    Args:
        temperature: of the Gumbel noise on the logits; 0 = none. Confidences come from the logits without it.
        never: ids that may not be predicted (``logits_eos_inf``).
        last: ids whose positions get confidence 0, so that they are filled last (``confidence_eos_eot_inf``).
    """
    logits = logits.float()
    logits[..., [mask_id, *never]] = float("-inf")
    scores = gumbel(logits, temperature, draw(*logits.shape)) if temperature > 0 else logits
    tokens = scores.argmax(dim=-1)
    logits[..., list(last)] = float("-inf")
    return tokens, torch.softmax(logits, dim=-1).gather(-1, tokens[..., None])[..., 0]
