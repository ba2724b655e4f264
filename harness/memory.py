"""Peak memory of decoding: the weights plus the most that was allocated while it ran."""

from __future__ import annotations

from pathlib import Path

import torch

from backbone.network import Network

STATUS, REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _resident(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


class PeakMemory:
    """Measures from its creation on. On a GPU the allocator's peak; on Linux the growth of the resident
    set over where it stood, on top of the weights; elsewhere None (not measured)."""

    def __init__(self, network: Network) -> None:
        self.device = network.device
        self.weights = sum({p.data_ptr(): p.numel() * p.element_size() for p in network.module.parameters()}.values())
        self.before: int | None = None
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            REFS.write_text("5")  # resets the kernel's high-water mark of this process
            self.before = _resident("VmRSS")
        except (OSError, StopIteration):
            pass

    def bytes(self) -> int | None:
        """Peak so far, in bytes."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return None if self.before is None else self.weights + max(0, _resident("VmHWM") - self.before)
