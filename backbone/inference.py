"""The decoding forward: lean functional code over the parameters of a transformers Llama or Qwen2.

At batch 1 a small network spends most of a step in Python and in small operations, and a large one
reads its weights once per step; so q, k and v are one product, keys and values go straight into their slots, and residual additions
ride on the matrix product. The fused matrix holds the very parameters of the module (its own become
views), so nothing is stored twice and training the module changes this forward too. On a CPU in float32
the logits are the module's, bit for bit: no operation rounds differently.

It is made of three steps per layer (``project``, ``attend``, ``feed_forward``), so that a policy may
choose rows per layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from backbone.cache import Positions, SlotCache

NARROW = 8  # products of at most this many columns are summed in another order on CPUs


def fuse(linears: list[torch.nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stack the weights (and biases) of linears with one input; their own parameters become views."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biased = [linear.bias is not None for linear in linears]
    if any(biased) != all(biased):
        raise ValueError("q, k and v must all have a bias or none: this layout has it on some only")
    bias = torch.cat([linear.bias.detach() for linear in linears]) if all(biased) else None
    start = 0
    for linear in linears:
        stop = start + linear.out_features
        linear.weight.data = weight[start:stop]
        if bias is not None:
            linear.bias.data = bias[start:stop]
        start = stop
    return weight, bias


class LeanForward:
    """The decoding forward over ``module`` (``LlamaForCausalLM`` or ``Qwen2ForCausalLM``, eval mode)."""

    def __init__(self, module: torch.nn.Module) -> None:
        config = module.config
        if config.hidden_act != "silu":
            raise ValueError(
                f"hidden_act is {config.hidden_act!r}: the lean forward knows 'silu' (use forward='module')"
            )
        self.module = module
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.epsilon, self.width = config.rms_norm_eps, (config.hidden_size,)
        kept = self.kv_heads * self.head_dim
        self.split = [self.heads * self.head_dim, kept, kept] if kept <= NARROW else None
        lower = module.lm_head.weight.dtype != torch.float32
        self.turn_in_float32 = lower and getattr(config, "rope_full_precision", False)
        self.layers = [self._layer(layer) for layer in module.model.layers]
        self.cos = self.sin = torch.empty(0)
        self._rotations(min(config.max_position_embeddings, 4096))

    def _layer(self, layer: torch.nn.Module) -> dict[str, torch.Tensor | None]:
        attention, mlp = layer.self_attn, layer.mlp
        qkv, qkv_bias = fuse([attention.q_proj, attention.k_proj, attention.v_proj])
        return {
            "qkv": qkv,
            "qkv_bias": qkv_bias,
            "o": attention.o_proj.weight.t(),
            "o_bias": attention.o_proj.bias,
            "gate": mlp.gate_proj.weight,  # not fused with up: SiLU rounds the rows of a strided view differently
            "gate_bias": mlp.gate_proj.bias,
            "up": mlp.up_proj.weight,
            "up_bias": mlp.up_proj.bias,
            "down": mlp.down_proj.weight.t(),
            "down_bias": mlp.down_proj.bias,
            "attention_norm": layer.input_layernorm.weight,
            "mlp_norm": layer.post_attention_layernorm.weight,
        }

    def _rotations(self, positions: int) -> None:
        """Tables of cos and sin, (positions, head_dim); sin carries the sign of the half rotation."""
        head = self.module.lm_head.weight
        probe = torch.empty(0, device=head.device, dtype=torch.float32 if self.turn_in_float32 else head.dtype)
        cos, sin = self.module.model.rotary_emb(probe, torch.arange(positions, device=head.device)[None])
        half = self.head_dim // 2
        self.cos, self.sin = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)

    def rotations(self, fed: Positions, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin, (Q, head_dim) or (rows, 1, Q, head_dim), of the fed positions, all below ``stop``."""
        if stop > len(self.cos):
            self._rotations(2 * stop)
        if isinstance(fed, torch.Tensor) and fed.ndim == 2:
            fed = fed[:, None]
        return self.cos[fed], self.sin[fed]

    def project(self, layer: dict, x: torch.Tensor, rows: int, cos: torch.Tensor, sin: torch.Tensor):
        """Rotated queries (rows, heads, Q, d) and the slots' new states (rows, 2 x kv_heads, Q, d)."""
        normed = F.rms_norm(x, self.width, layer["attention_norm"], self.epsilon)
        qkv = self.products(normed, layer["qkv"], layer["qkv_bias"])
        qkv = qkv.view(rows, -1, self.heads + 2 * self.kv_heads, self.head_dim).transpose(1, 2)  # (rows, H', Q, d)
        turned = qkv[:, : self.heads + self.kv_heads]  # queries and keys turn, values do not
        exact = turned.float() if self.turn_in_float32 else turned
        # not addcmul, which rounds once less than the module
        torch.add(exact * cos, exact.roll(self.head_dim // 2, -1).mul_(sin), out=turned)
        return qkv[:, : self.heads], qkv[:, self.heads :]

    def products(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Queries, keys and values side by side, in one product wherever that changes no rounding."""
        if self.split is None:
            return F.linear(x, weight, bias)
        biases = (None,) * 3 if bias is None else bias.split(self.split)
        return torch.cat([F.linear(x, w, b) for w, b in zip(weight.split(self.split), biases, strict=True)], dim=-1)

    def attend(self, layer: dict, residual: torch.Tensor, queries: torch.Tensor, keys, values, mask) -> torch.Tensor:
        """Attention, added to ``residual`` (rows * Q, D); ``mask`` is additive, broadcastable to (rows, heads, Q, see)."""
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, enable_gqa=self.heads != self.kv_heads
        )
        mixed = mixed.transpose(1, 2).reshape(len(residual), -1)  # (rows * Q, heads * d)
        x = torch.addmm(residual, mixed, layer["o"])
        return x if layer["o_bias"] is None else x + layer["o_bias"]

    def feed_forward(self, layer: dict, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The gated MLP on ``x``, added to ``residual``."""
        normed = F.rms_norm(x, self.width, layer["mlp_norm"], self.epsilon)
        gate = F.silu(F.linear(normed, layer["gate"], layer["gate_bias"]))
        x = torch.addmm(residual, gate.mul_(F.linear(normed, layer["up"], layer["up_bias"])), layer["down"])
        return x if layer["down_bias"] is None else x + layer["down_bias"]

    def __call__(
        self, ids: torch.Tensor, fed: Positions, cache: SlotCache, see: int, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Hidden states (rows, Q, D) after the final norm; writes the fed slots of ``cache``."""
        rows, count = ids.shape
        cos, sin = self.rotations(fed, cache.capacity)
        x = F.embedding(ids.reshape(-1), self.module.model.embed_tokens.weight)  # (rows * Q, D)
        for number, layer in enumerate(self.layers):
            queries, states = self.project(layer, x, rows, cos, sin)
            cache.write(number, fed, states)
            keys, values = cache.seen(number, see)
            x = self.attend(layer, x, queries, keys, values, mask)
            x = self.feed_forward(layer, x, x)
        x = F.rms_norm(x, self.width, self.module.model.norm.weight, self.epsilon)
        return x.view(rows, count, -1)
