"""Which tokens a diffusion decoder commits: predictions, confidences, and the selection rules.

One implementation for every system. MASK is never a legal prediction: its logit is removed before
anything else (a model that prefers it would otherwise spin without committing, spec of the reference's
defects in ``docs/deviations.md``).
"""

from __future__ import annotations

import torch

from backbone.network import Network

END_RULES = ("stop", "finish")


def predictions(logits: torch.Tensor, mask_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens and their probabilities, both (...,), of logits (..., V); float32 softmax."""
    logits = logits.float()
    logits[..., mask_id] = float("-inf")
    confidences, tokens = torch.softmax(logits, dim=-1).max(dim=-1)
    return tokens, confidences


def most_confident(confidences: list[float], count: int) -> list[int]:
    """Indices of the ``count`` highest confidences (LLaDA's low-confidence remasking); ties: lowest index."""
    return sorted(sorted(range(len(confidences)), key=lambda i: -confidences[i])[:count])


def above(confidences: list[float], threshold: float) -> list[int]:
    """Indices with confidence strictly above ``threshold`` (D2F); may be empty."""
    return [i for i, c in enumerate(confidences) if c > threshold]


def best_and_at_least(confidences: list[float], threshold: float) -> list[int]:
    """Indices with confidence of at least ``threshold``, and always the best (Fast-dLLM); ties: lowest index."""
    best = max(range(len(confidences)), key=confidences.__getitem__)
    return [i for i, c in enumerate(confidences) if c >= threshold or i == best]


def quotas(masks: int, steps: int) -> list[int]:
    """How many tokens each of ``steps`` commits, as evenly as can be, the early ones first (LLaDA)."""
    each, more = divmod(masks, steps)
    return [each + (i < more) for i in range(steps)]


def check_threshold(name: str, value: float) -> None:
    """Refuse a threshold outside [0, 1] in one line."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}: give a number from 0 to 1")


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not one of ``allowed`` in one line."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}: choose one of {', '.join(allowed)}")


def check_request(network: Network, prompt: torch.Tensor, max_new_tokens: int) -> None:
    """Refuse a prompt or length that cannot be decoded, in one line."""
    if prompt.ndim != 1 or len(prompt) == 0:
        raise ValueError(f"the prompt has shape {tuple(prompt.shape)}: give at least one token, as one row")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}: give a whole number of at least 1")
    if network.mask_id is not None and bool((prompt == network.mask_id).any()):
        raise ValueError(f"the prompt holds the mask id {network.mask_id}: only the decoder may put masks")


def answer_length(tokens: list[int], network: Network) -> int | None:
    """Length of the answer with its first end token, if nothing before it is masked; else None.

    The shared early-stop rule (``after_eos: stop``): a decoder may end as soon as this is not None.
    """
    for i, token in enumerate(tokens):
        if token == network.mask_id:
            return None
        if token in network.end_ids:
            return i + 1
    return None
