"""The decoding forward: lean functional code over the parameters of a transformers Llama or Qwen2.

At batch 1 a small network spends most of a step in Python and in small operations, and a large one
reads its weights once per step; so projections that read the same input are fused (q, k, v; gate, up),
keys and values go straight into their slots, and residual additions ride on the matrix product. The
fused matrices hold the very parameters of the module (its own become views), so nothing is stored
twice and training the module changes this forward too.

It is made of three steps per layer (``project``, ``attend``, ``feed_forward``), so that a policy may
choose rows per layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from backbone.cache import Positions, SlotCache


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
        self.layers = [self._layer(layer) for layer in module.model.layers]
        self.cos = self.sin = torch.empty(0)
        self._rotations(min(config.max_position_embeddings, 4096))

    def _layer(self, layer: torch.nn.Module) -> dict[str, torch.Tensor | None]:
        attention, mlp = layer.self_attn, layer.mlp
        qkv, qkv_bias = fuse([attention.q_proj, attention.k_proj, attention.v_proj])
        gate_up, gate_up_bias = fuse([mlp.gate_proj, mlp.up_proj])
        return {
            "qkv": qkv,
            "qkv_bias": qkv_bias,
            "o": attention.o_proj.weight.t(),
            "o_bias": attention.o_proj.bias,
            "gate_up": gate_up,
            "gate_up_bias": gate_up_bias,
            "down": mlp.down_proj.weight.t(),
            "down_bias": mlp.down_proj.bias,
            "attention_norm": layer.input_layernorm.weight,
            "mlp_norm": layer.post_attention_layernorm.weight,
        }

    def _rotations(self, positions: int) -> None:
        """Tables of cos and sin, (positions, head_dim); sin carries the sign of the half rotation."""
        probe = self.module.lm_head.weight
        cos, sin = self.module.model.rotary_emb(probe, torch.arange(positions, device=probe.device)[None])
        half = self.head_dim // 2
        self.cos, self.sin = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)

    def rotations(self, fed: Positions, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin, (Q, head_dim), of the fed positions, all below ``stop``."""
        if stop > len(self.cos):
            self._rotations(2 * stop)
        return self.cos[fed], self.sin[fed]

    def project(self, layer: dict, x: torch.Tensor, rows: int, cos: torch.Tensor, sin: torch.Tensor):
        """Rotated queries (rows, heads, Q, d) and the slots' new states (rows, 2 x kv_heads, Q, d)."""
        normed = F.rms_norm(x, self.width, layer["attention_norm"], self.epsilon)
        qkv = F.linear(normed, layer["qkv"], layer["qkv_bias"])
        qkv = qkv.view(rows, -1, self.heads + 2 * self.kv_heads, self.head_dim).transpose(1, 2)  # (rows, H', Q, d)
        turned = qkv[:, : self.heads + self.kv_heads]  # queries and keys turn, values do not
        turned.copy_(torch.addcmul(turned * cos, turned.roll(self.head_dim // 2, -1), sin))
        return qkv[:, : self.heads], qkv[:, self.heads :]

    def attend(self, layer: dict, x: torch.Tensor, queries: torch.Tensor, keys, values, mask) -> torch.Tensor:
        """Attention and its residual; ``mask`` is additive, broadcastable to (rows, heads, Q, see)."""
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, enable_gqa=self.heads != self.kv_heads
        )
        mixed = mixed.transpose(1, 2).reshape(len(x), -1)  # (rows * Q, heads * d)
        x = torch.addmm(x, mixed, layer["o"])
        return x if layer["o_bias"] is None else x + layer["o_bias"]

    def feed_forward(self, layer: dict, x: torch.Tensor) -> torch.Tensor:
        """The gated MLP and its residual."""
        normed = F.rms_norm(x, self.width, layer["mlp_norm"], self.epsilon)
        gate, up = F.linear(normed, layer["gate_up"], layer["gate_up_bias"]).chunk(2, dim=-1)
        x = torch.addmm(x, F.silu(gate).mul_(up), layer["down"])
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
            x = self.feed_forward(layer, x)
        x = F.rms_norm(x, self.width, self.module.model.norm.weight, self.epsilon)
        return x.view(rows, count, -1)
