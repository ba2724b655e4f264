"""Muon in float32: the update of ``torch.optim.Muon``, orthogonalised in the precision of any CPU.

torch's own orthogonalises in bfloat16, which a CPU without bfloat16 instructions emulates: there it is
eight times slower than this one and takes more time than the rest of a training step.
"""

from __future__ import annotations

import torch

QUINTIC = (3.4445, -4.775, 2.0315)  # Newton-Schulz coefficients and steps of Jordan et al. (2024), as in torch
ITERATIONS = 5


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """(n, R, C) float32 with the singular values of each matrix moved to about 1."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are orthogonal matrices, for 2-D weights; all of one shape are updated at once.

    Args:
        params: 2-D parameters.
        lr: rate for a step of root-mean-square 0.2, AdamW's usual one, whatever the shape.
        momentum: Nesterov's.
        weight_decay: decoupled, as a share of ``lr``.
    """

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            alike: dict[torch.Size, list[torch.Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    alike.setdefault(weight.shape, []).append(weight)
            for shape, weights in alike.items():
                updates = orthogonalised(torch.stack([self._ahead(weight, group["momentum"]) for weight in weights]))
                rate = 0.2 * group["lr"] * max(shape) ** 0.5
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(weights, list(updates.to(weights[0].dtype)), alpha=-rate)

    def _ahead(self, weight: torch.Tensor, momentum: float) -> torch.Tensor:
        """The gradient's moving average, looked at one step ahead (Nesterov), in float32."""
        gradient = weight.grad.float()
        average = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(gradient))
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum)
