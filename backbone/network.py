"""``Network``: a transformers causal-LM module plus what makes it a diffusion LM.

One call serves every system: feed token ids at positions, say what they may see, and get the logits
that *predict the asked positions*. Where those logits come from (a position's own row as in LLaDA, or
the row before it as in Dream and in every AR model) is decided here and nowhere else.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from backbone.cache import Positions, SlotCache
from backbone.inference import LeanForward

FORWARDS = ("lean", "module")
DESCRIPTION = "network.json"  # beside config.json: what transformers' config has no place for


class Network:
    """A module with its mask id, end ids and shift; counts forwards and fed positions.

    Args:
        module: native ``LlamaForCausalLM`` or ``Qwen2ForCausalLM``.
        mask_id: id of MASK; None for an autoregressive model.
        end_ids: ids that end an answer.
        shift: logits of row i predict position i + 1 (Dream, AR) instead of i (LLaDA).
        forward: ``lean`` (:mod:`backbone.inference`) or ``module`` (transformers' own forward).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        mask_id: int | None,
        end_ids: tuple[int, ...],
        shift: bool = False,
        forward: str = "lean",
    ) -> None:
        vocabulary = module.config.vocab_size
        for name, token in [("mask id", mask_id), *(("end id", e) for e in end_ids)]:
            if token is not None and not 0 <= token < vocabulary:
                raise ValueError(f"{name} {token} is outside the vocabulary of {vocabulary}: check {DESCRIPTION}")
        self.module = module.eval().requires_grad_(False)
        self.mask_id, self.end_ids, self.shift = mask_id, tuple(end_ids), shift
        self.run = make_forward(forward, module)
        self.device, self.dtype = module.lm_head.weight.device, module.lm_head.weight.dtype
        self.forwards = self.fed = 0
        self.profile = False  # when on, ``seconds`` adds up the time spent in forwards
        self.seconds = 0.0

    def cache(self, rows: int, capacity: int) -> SlotCache:
        """An empty cache for ``capacity`` positions, refused when the context is shorter."""
        config = self.module.config
        if capacity > config.max_position_embeddings:
            raise ValueError(
                f"prompt and answer need {capacity} positions, but the model's context has "
                f"{config.max_position_embeddings}: shorten the prompt or max_new_tokens"
            )
        keeps_hidden = self.shift and self.mask_id is not None
        return SlotCache(
            layers=config.num_hidden_layers,
            rows=rows,
            kv_heads=config.num_key_value_heads,
            capacity=capacity,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            width=config.hidden_size if keeps_hidden else 0,
            like=self.module.lm_head.weight,
        )

    def predict(
        self,
        ids: torch.Tensor,
        fed: Positions,
        ask: Positions,
        cache: SlotCache,
        see: int,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits (rows, A, V) that predict the asked positions.

        Args:
            ids: (rows, Q) tokens at the fed positions.
            fed: the positions fed; their slots are written.
            ask: the positions to predict. With ``shift`` a position's predecessor need not be fed if
                an earlier forward fed it into this cache.
            cache: from :meth:`cache`.
            see: each fed position sees the slots ``[0, see)``,
            mask: less what this additive mask, broadcastable to (rows, heads, Q, see), takes away.
        """
        started = time.perf_counter() if self.profile else 0.0
        hidden = self.run(ids, fed, cache, see, mask)  # (rows, Q, D)
        if cache.hidden is not None:
            cache.hidden[:, fed] = hidden
            sources = cache.hidden[:, shifted(ask, 1)]
        else:
            sources = hidden[:, within(fed, shifted(ask, int(self.shift)))]
        logits = F.linear(sources, self.module.lm_head.weight, self.module.lm_head.bias)
        self.forwards += 1
        self.fed += ids.shape[1]
        if self.profile:
            synchronise(self.device)
            self.seconds += time.perf_counter() - started
        return logits


def make_forward(forward: str, module: torch.nn.Module):
    """The forward of that name over ``module``."""
    if forward not in FORWARDS:
        raise ValueError(f"forward is {forward!r}: choose one of {', '.join(FORWARDS)}")
    if forward == "lean":
        return LeanForward(module)
    from backbone.module_forward import ModuleForward  # imports transformers, which takes two seconds

    return ModuleForward(module)


def shifted(positions: Positions, by: int) -> Positions:
    """``positions`` moved ``by`` to the left."""
    if isinstance(positions, slice):
        return slice(positions.start - by, positions.stop - by)
    return positions - by if by else positions


def within(fed: Positions, wanted: Positions) -> Positions:
    """Where the wanted positions stand among the fed ones, which must contain them."""
    if not isinstance(fed, slice):
        wanted = torch.arange(wanted.start, wanted.stop, device=fed.device) if isinstance(wanted, slice) else wanted
        return torch.searchsorted(fed, wanted)
    return shifted(wanted, fed.start)


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished, so that a clock read now means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def load_network(folder: Path, *, forward: str = "lean", device: str = "cpu", dtype: str = "float32") -> Network:
    """Load a model folder (transformers layout plus ``network.json``); safetensors only, no remote code.

    Raises:
        FileNotFoundError: something is missing; the message says what.
        ValueError: an unknown architecture or forward, or a device that is not there.
    """
    from transformers import AutoModelForCausalLM

    path = Path(folder) / DESCRIPTION
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: {folder} is not a model folder of this suite")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but torch finds no GPU here: use device cpu")
    described = json.loads(path.read_text())
    module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), use_safetensors=True, attn_implementation="sdpa", local_files_only=True
    )
    return Network(
        module.to(device),
        mask_id=described["mask_id"],
        end_ids=tuple(described["end_ids"]),
        shift=described["shift"],
        forward=forward,
    )
