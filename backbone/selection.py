"""Which of the asked positions a diffusion decoder commits: one implementation of each rule, for every system.

A rule takes the confidences of one row's masked positions and returns indices into them. These lists are
short (a block, at most an answer) and have come to the host anyway, where the tokens are recorded.
"""

from __future__ import annotations

import torch

from backbone.network import Network

END_RULES = ("stop", "finish")


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


def factor_rule(confidences: list[float], factor: float) -> list[int]:
    """The n best as long as (n + 1)(1 - c_n) <= factor, and always the best (Fast-dLLM); ties: lowest index.

    The public code also commits the first failing candidate when it is the last one: a slip, not the rule.
    """
    order = sorted(range(len(confidences)), key=lambda i: -confidences[i])
    count = 1
    while count < len(order) and confidences[order[count]] >= 1 - factor / (count + 2):
        count += 1
    return sorted(order[:count])


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


def check_size(name: str, value: int, least: int = 1) -> None:
    """Refuse a size or count below ``least`` in one line."""
    if value < least:
        raise ValueError(f"{name} is {value}: give a whole number of at least {least}")


def check_request(network: Network, prompt: torch.Tensor, max_new_tokens: int) -> None:
    """Refuse a prompt, (P,) or (rows, P), or a length that cannot be decoded, in one line."""
    if prompt.ndim not in (1, 2) or prompt.shape[-1] == 0 or prompt.shape[0] == 0:
        raise ValueError(f"the prompt has shape {tuple(prompt.shape)}: give at least one token")
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
