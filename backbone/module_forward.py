"""transformers' own forward over a ``SlotCache``: what the lean forward must equal, and what a system
costs for someone who uses the modelling code as it comes."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache

from backbone.cache import Positions, SlotCache


class SlotView(Cache):
    """A ``SlotCache`` in the shape transformers' attention expects, for one forward."""

    def __init__(self, cache: SlotCache, fed: Positions, see: int) -> None:
        super().__init__(layers=[])
        self.cache, self.fed, self.see = cache, fed, see

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Write the fed slots of a layer and return what may be seen."""
        self.cache.write(layer_idx, self.fed, torch.cat([key_states, value_states], dim=1))
        return self.cache.seen(layer_idx, self.see)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given


class ModuleForward:
    """Same call as :class:`backbone.inference.LeanForward`, through the module."""

    def __init__(self, module: torch.nn.Module) -> None:
        if getattr(module.config, "rope_full_precision", False) and module.dtype != torch.float32:
            raise ValueError(
                f"dtype is {module.dtype} and rope_full_precision is on, but forward: module turns queries and keys in "
                "the dtype of the weights: use forward: lean, or float32"
            )
        self.module = module

    def __call__(
        self, ids: torch.Tensor, fed: Positions, cache: SlotCache, see: int, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Hidden states (rows, Q, D) after the final norm; writes the fed slots of ``cache``."""
        positions = torch.arange(fed.start, fed.stop, device=ids.device) if isinstance(fed, slice) else fed
        if mask is None:  # no mask would mean causal
            mask = torch.zeros(1, 1, 1, 1, dtype=self.module.dtype, device=ids.device)
        mask = mask.expand(1, 1, ids.shape[1], see)
        view = SlotView(cache, fed, see)
        return self.module.model(
            ids,
            attention_mask=mask,
            position_ids=positions if positions.ndim == 2 else positions[None],
            cache=view,
            use_cache=True,
        ).last_hidden_state
