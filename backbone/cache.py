"""``SlotCache``: preallocated keys and values, one slot per position.

A forward writes the slots of the positions it is fed and sees the slots ``[0, see)``. Every cache
policy of every system is a choice of what to feed and what to see:

- AR feeds one position and sees everything up to it;
- D2F feeds all positions behind its exact prefix; "commit" is the decoder moving that border;
- Fast-dLLM feeds the block (dual) or the block and what follows (prefix) and sees every slot, stale ones too;
- vanilla feeds everything and sees everything.

Nothing is ever copied or cropped: a slot that is not final is simply written again.
"""

from __future__ import annotations

import torch

Positions = slice | torch.Tensor  # a contiguous run, or int64 positions: (Q,) for all rows, or (rows, Q) for each


class SlotCache:
    """Keys and values of all layers: ``states[layer]`` is (rows, 2 x kv_heads, capacity, head_dim).

    Keys (already rotated) and values lie in one tensor so that a layer writes both at once.

    Args:
        layers, rows, kv_heads, capacity, head_dim: sizes; ``capacity`` is prompt plus longest answer.
        width: also keep each slot's final hidden state (rows, capacity, width), which a network with
            shifted logits needs to predict a position whose predecessor is not fed again; 0 = do not.
    """

    def __init__(
        self, *, layers: int, rows: int, kv_heads: int, capacity: int, head_dim: int, width: int = 0, like: torch.Tensor
    ) -> None:
        options = {"dtype": like.dtype, "device": like.device}
        self.states = [torch.zeros(rows, 2 * kv_heads, capacity, head_dim, **options) for _ in range(layers)]
        self.hidden = torch.zeros(rows, capacity, width, **options) if width else None
        self.kv_heads, self.capacity = kv_heads, capacity

    def write(self, layer: int, fed: Positions, states: torch.Tensor) -> None:
        """Store (rows, 2 x kv_heads, Q, head_dim): rotated keys, then values, of the fed positions."""
        put(self.states[layer], fed, states)

    def keep_hidden(self, fed: Positions, hidden: torch.Tensor) -> None:
        """Store the final hidden states (rows, Q, width) of the fed positions."""
        put(self.hidden[:, None], fed, hidden[:, None])

    def seen(self, layer: int, see: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of keys and values, (rows, kv_heads, see, head_dim), of the slots ``[0, see)``."""
        visible = self.states[layer][:, :, :see]
        return visible[:, : self.kv_heads], visible[:, self.kv_heads :]


def put(slots: torch.Tensor, fed: Positions, values: torch.Tensor) -> None:
    """Write ``values`` (rows, H, Q, d) into ``slots`` (rows, H, capacity, d) at the fed positions."""
    if isinstance(fed, torch.Tensor) and fed.ndim == 2:
        slots.scatter_(2, fed[:, None, :, None].expand_as(values), values)
    else:
        slots[:, :, fed] = values
