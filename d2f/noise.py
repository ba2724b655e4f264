"""Block-wise noise: which share of each answer block is masked while the student learns.

- ``monotone``: the authors' code: the first ratio is uniform, later blocks are masked at least as much, up
  to a highest ratio. Nearly flat, and no block is ever fully masked.
- ``increasing``: the paper's text (section 4.2) asks for strictly increasing ratios between a lowest and a
  highest one and leaves the steepness open. Here: equal steps over that whole range.
- ``random``: an independent uniform ratio per block, the paper's comparison (Table 4).
- ``steep``: what the pipelined decoder really shows the model. For half the rows a front at a random
  place, clean blocks before it, fully masked ones behind, a ramp of a few blocks between; for the other
  half sorted uniform ratios. New blocks are fully masked when they are appended, so the student must
  have seen that.
"""

from __future__ import annotations

import torch

SCHEDULES = ("monotone", "increasing", "random", "steep")
CLEAN = 0.02  # ratio of blocks before a steep front: not quite 0, so that they are trained a little too


def monotone(first: torch.Tensor, increments: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Ratios (rows, N) from uniforms ``first`` (rows, 1) and ``increments`` (rows, N - 1).

    p_1 = low + (high - low) u_1, and p_j = p_{j-1} + u_j (high - p_1) / (N - 1).
    """
    start = low + (high - low) * first
    steps = increments * (high - start) / max(1, increments.shape[1])
    return torch.cat([start, start + steps.cumsum(dim=1)], dim=1).clamp(max=1.0)


def increasing(offset: torch.Tensor, blocks: int, low: float, high: float) -> torch.Tensor:
    """Ratios (rows, N) from uniforms ``offset`` (rows, 1): p_j = low + (high - low) (j - 1 + u) / N."""
    return low + (high - low) * (torch.arange(blocks) + offset) / blocks


def steep(rows: int, blocks: int, answered: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Ratios (rows, N); ``answered`` (rows,) is the number of blocks before the padding begins."""
    fronts = rows // 2
    centre = torch.rand(fronts, 1, generator=generator) * (answered[:fronts, None] + 0.5)
    width = 0.5 + 2.5 * torch.rand(fronts, 1, generator=generator)  # in blocks
    ramp = ((torch.arange(blocks) + 0.5 - centre) / width + 0.5).clamp(CLEAN, 1.0)
    return torch.cat([ramp, torch.rand(rows - fronts, blocks, generator=generator).sort(dim=1).values.clamp(min=CLEAN)])


def block_ratios(
    schedule: str, rows: int, blocks: int, answered: torch.Tensor, low: float, high: float, generator: torch.Generator
) -> torch.Tensor:
    """Mask ratios (rows, N) of one batch; ``low`` and ``high`` bound all schedules but ``steep``."""
    if schedule == "monotone":
        first = torch.rand(rows, 1, generator=generator)
        return monotone(first, torch.rand(rows, blocks - 1, generator=generator), low, high)
    if schedule == "increasing":
        return increasing(torch.rand(rows, 1, generator=generator), blocks, low, high)
    if schedule == "random":
        return low + (high - low) * torch.rand(rows, blocks, generator=generator)
    return steep(rows, blocks, answered, generator)
