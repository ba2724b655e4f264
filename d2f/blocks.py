"""Blocks and who sees whom (D2F, arXiv:2508.09192, section 4.1).

The prompt is block 0; the answer is cut into blocks of B from the end of the prompt, the last one as
short as need be. A query sees a key **iff the key's block is not later than the query's**: everything
inside a block, the prompt and all earlier blocks in whatever state they are, nothing later.
"""

from __future__ import annotations

import torch


def block_numbers(prompt: int, length: int, block_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """(length,) block number of each position: 0 in the prompt, then 1, 2, ..."""
    positions = torch.arange(length, device=device)
    return torch.where(positions < prompt, 0, 1 + (positions - prompt) // block_size)


def visible(query_block: torch.Tensor, key_block: torch.Tensor) -> torch.Tensor:
    """The visibility predicate, elementwise on block numbers."""
    return key_block <= query_block


def additive_visibility(
    prompt: int, length: int, block_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """(length, length) additive mask: 0 where query row may see key column, else -inf."""
    blocks = block_numbers(prompt, length, block_size, device)
    mask = torch.zeros(length, length, device=device, dtype=dtype)
    return mask.masked_fill_(~visible(blocks[:, None], blocks[None, :]), float("-inf"))


def flex_visibility(prompt: int, length: int, block_size: int, device: torch.device | str = "cpu"):
    """The same predicate as a FlexAttention block mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    blocks = block_numbers(prompt, length, block_size, device)

    def predicate(batch, head, query, key):
        return visible(blocks[query], blocks[key])

    return create_block_mask(predicate, None, None, length, length, device=str(device))
