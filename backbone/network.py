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
        vocabulary = getattr(module.config, "real_vocab_size", module.config.vocab_size)
        for name, token in [("mask id", mask_id), *(("end id", e) for e in end_ids)]:
            if token is not None and not 0 <= token < vocabulary:
                raise ValueError(f"{name} {token} is outside the vocabulary of {vocabulary}: check {DESCRIPTION}")
        if module.model.rotary_emb.inv_freq.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"the rotary frequencies are {module.model.rotary_emb.inv_freq.dtype}, which changes every angle: "
                "load the model in that dtype (load_network) instead of casting the module"
            )
        self.module = module.eval().requires_grad_(False)
        self.head = module.lm_head.weight.detach()[:vocabulary]  # a view; without the rows that only pad the matrix
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
        """Logits (rows, A, V) that predict the asked positions; V leaves out rows that only pad the vocabulary.

        Args:
            ids: (rows, Q) tokens at the fed positions.
            fed: the positions fed, the same in all rows or (rows, Q) of each; their slots are written.
            ask: the positions to predict. With ``shift`` a position's predecessor need not be fed if
                an earlier forward fed it into this cache.
            cache: from :meth:`cache`.
            see: each fed position sees the slots ``[0, see)``,
            mask: less what this additive mask, broadcastable to (rows, heads, Q, see), takes away.
        """
        started = time.perf_counter() if self.profile else 0.0
        hidden = self.run(ids, fed, cache, see, mask)  # (rows, Q, D)
        if cache.hidden is not None:
            cache.keep_hidden(fed, hidden)
            sources = cache.hidden[:, shifted(ask, 1)]
        else:
            sources = pick(hidden, within(fed, shifted(ask, int(self.shift))))
        logits = self.logits(sources, ids.shape[1])
        if self.profile:
            synchronise(self.device)
            self.seconds += time.perf_counter() - started
        return logits

    def logits(self, hidden: torch.Tensor, fed: int) -> torch.Tensor:
        """Logits (..., V) of final hidden states (..., D); ends a forward that was fed so many positions of each row."""
        self.forwards += 1
        self.fed += fed
        return F.linear(hidden, self.head)


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
    """Where the wanted positions stand among the fed ones, which are in order and should contain them.

    With positions (rows, Q) of each row, a row that was not fed a wanted position gets another one's place:
    nobody asks for it there.
    """
    if isinstance(fed, slice):
        return shifted(wanted, fed.start)
    wanted = torch.arange(wanted.start, wanted.stop, device=fed.device) if isinstance(wanted, slice) else wanted
    if fed.ndim == 1:
        return torch.searchsorted(fed, wanted)
    return torch.searchsorted(fed, wanted.expand(len(fed), -1).contiguous()).clamp(max=fed.shape[1] - 1)


def pick(hidden: torch.Tensor, places: Positions) -> torch.Tensor:
    """(rows, A, D) of ``hidden`` (rows, Q, D) at places that are the same in all rows, or (rows, A)."""
    if isinstance(places, torch.Tensor) and places.ndim == 2:
        return hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
    return hidden[:, places]


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished, so that a clock read now means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def load_network(
    folder: Path, *, adapter: Path | None = None, forward: str = "lean", device: str = "cpu", dtype: str = "float32"
) -> Network:
    """Load a model folder; safetensors only, and nothing that comes with a model is executed.

    What makes it a diffusion LM stands in ``network.json`` (folders of this suite) or else follows from the
    original config (:func:`backbone.checkpoints.describe`).

    Args:
        folder: LLaDA, Dream, Llama or Qwen2, as published or as written here.
        adapter: folder of a published LoRA adapter, which is merged into the weights.

    Raises:
        FileNotFoundError: something is missing; the message says what.
        ValueError: an unknown architecture or forward, a config field that cannot be honoured, tensors that
            do not fit, or a device that is not there.
    """
    from backbone.checkpoints import describe, load_module  # imports transformers, which takes two seconds

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but torch finds no GPU here: use device cpu")
    path = Path(folder) / DESCRIPTION
    described = json.loads(path.read_text()) if path.exists() else describe(folder)
    module = load_module(folder, device=device, dtype=getattr(torch, dtype))
    if adapter is not None:
        from backbone.adapters import load_adapter

        load_adapter(adapter).merge(module)
    return Network(
        module,
        mask_id=described["mask_id"],
        end_ids=tuple(described["end_ids"]),
        shift=described["shift"],
        forward=forward,
    )
