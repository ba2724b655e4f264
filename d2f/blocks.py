"""Blocks and who sees whom (D2F, arXiv:2508.09192, section 4.1).

The prompt is block 0; the answer is cut into blocks of B from the end of the prompt, the last one as
short as need be. A query sees a key **iff the key's block is not later than the query's**: everything
inside a block, the prompt and all earlier blocks in whatever state they are, nothing later.

``prompt`` is the prompt's length: a whole number, or a tensor (rows,) with one length per row of a batch.
Results then have a leading dimension of rows.
"""

from __future__ import annotations

import torch


def block_numbers(
    prompt: int | torch.Tensor, length: int, block_size: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """(length,) or (rows, length) block number of each position: 0 in the prompt, then 1, 2, ..."""
    positions = torch.arange(length, device=device)
    if isinstance(prompt, torch.Tensor):
        prompt = prompt.to(device)[:, None]
    return torch.where(positions < prompt, 0, 1 + (positions - prompt) // block_size)


def block_count(prompt: int | torch.Tensor, length: int, block_size: int) -> int:
    """Answer blocks N; of a ragged batch, those of its longest answer, so that one schedule serves all rows."""
    shortest = int(prompt.min()) if isinstance(prompt, torch.Tensor) else prompt
    return -(-(length - shortest) // block_size)


def visible(query_block: torch.Tensor, key_block: torch.Tensor) -> torch.Tensor:
    """The visibility predicate, elementwise on block numbers."""
    return key_block <= query_block


def additive_visibility(
    prompt: int | torch.Tensor,
    length: int,
    block_size: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """(length, length) or (rows, length, length) additive mask: 0 where query row may see key column, else -inf."""
    blocks = block_numbers(prompt, length, block_size, device)
    mask = torch.zeros(*blocks.shape, length, device=device, dtype=dtype)
    return mask.masked_fill_(~visible(blocks[..., :, None], blocks[..., None, :]), float("-inf"))


def flex_visibility(prompt: int | torch.Tensor, length: int, block_size: int, device: torch.device | str = "cpu"):
    """The same predicate as a FlexAttention block mask; of one row for any batch, or of each row of a ragged one."""
    from torch.nn.attention.flex_attention import create_block_mask

    blocks = block_numbers(prompt, length, block_size, device)
    rows = len(blocks) if blocks.ndim == 2 else None

    def predicate(batch, head, query, key):
        if rows is None:
            return visible(blocks[query], blocks[key])
        return visible(blocks[batch, query], blocks[batch, key])

    return create_block_mask(predicate, rows, None, length, length, device=str(device))
