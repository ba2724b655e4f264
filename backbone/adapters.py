"""Published LoRA adapters (arXiv:2106.09685; PEFT's file layout), merged into the weights and taken out again.

An adapter adds ``scale * B @ A`` to some matrices. It is trained on the original modelling code, so its
names are the original ones and go through the same rename as the weights. A name that matches nothing makes
other loaders warn and return the base model, whose numbers then pass for the adapter's; here every tensor
must find its matrix, every matrix that the config targets must get its tensors, and something must change.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import torch

from backbone.checkpoints import llada_name, refuse_misfits, refuse_unknown, required, stored

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
READ = {"init_lora_weights", "lora_alpha", "peft_type", "r", "target_modules", "use_rslora"}
# fmt: off
IDLE = {  # bookkeeping, or read only in training or together with something that must be off
    "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "task_type",
}
# fmt: on
INITIAL = (True, False, "gaussian")  # others (PiSSA, OLoRA, LoftQ, ...) also change the base weights


class Adapter:
    """Pairs of A and B for named matrices; see :func:`load_adapter`.

    Args:
        pairs: module name, as the adapter calls it -> (A (r, in), B (out, r)), float32.
        scale: what ``B @ A`` is multiplied with.
        targets: the module names that the config targets: a list of endings, or a pattern.
        where: the folder, for messages.
    """

    def __init__(
        self,
        pairs: dict[str, tuple[torch.Tensor, torch.Tensor]],
        scale: float,
        targets: list[str] | str,
        where: Path,
    ) -> None:
        self.pairs, self.scale, self.targets, self.where = pairs, scale, targets, where
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # (weight, its values before the merge)

    @torch.no_grad()
    def merge(self, module: torch.nn.Module) -> None:
        """Add the adapter to the weights of ``module``, in place, so that views of them see it too.

        The sum is taken in float32 and rounded once to the weights' dtype.

        Raises:
            ValueError: already merged; a matrix is missing, untargeted or misshapen; nothing would change.
        """
        if self.kept:
            raise ValueError(f"{self.where} is merged already: unmerge it first")
        for weight, (a, b) in self._matched(module):
            self.kept.append((weight, weight.to("cpu", copy=True)))
            delta = self.scale * (b.to(weight.device) @ a.to(weight.device))
            weight.copy_(weight.float() + delta)
        if all(torch.equal(weight.cpu(), before) for weight, before in self.kept):
            self.kept.clear()
            raise ValueError(f"{self.where} changes no weight in {weight.dtype}: it would measure the base model")

    @torch.no_grad()
    def unmerge(self) -> None:
        """Put back the very bits that were there before :meth:`merge`.

        Raises:
            ValueError: not merged.
        """
        if not self.kept:
            raise ValueError(f"{self.where} is not merged: nothing to take out")
        for weight, before in self.kept:
            weight.copy_(before)
        self.kept.clear()

    def _matched(self, module: torch.nn.Module) -> list[tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]:
        """Each pair with the weight it belongs to, after all have been checked."""
        weights = named_matrices(module, set(self.pairs))
        wanted = {name for name in weights if targeted(name, self.targets)}
        both = self.pairs.keys() & wanted
        shapes = {name: (len(b), a.shape[1]) for name, (a, b) in self.pairs.items()}
        problems = {
            "targeted matrices without tensors": list(wanted - both),
            "tensors without a targeted matrix": list(self.pairs.keys() - both),
            "misshapen": [
                f"{name} {shapes[name]} not {tuple(weights[name].shape)}"
                for name in both
                if shapes[name] != tuple(weights[name].shape)
            ],
        }
        refuse_misfits(problems, self.where)
        return [(weights[name], pair) for name, pair in self.pairs.items()]


def named_matrices(module: torch.nn.Module, used: set[str]) -> dict[str, torch.Tensor]:
    """Weights of all linear modules under the names the adapter uses: native ones, or LLaDA's for a Llama."""
    native = {name: linear.weight for name, linear in module.named_modules() if isinstance(linear, torch.nn.Linear)}
    if module.config.model_type != "llama" or used & native.keys():
        return native
    return {llada_name(f"{name}.weight").removesuffix(".weight"): weight for name, weight in native.items()}


def targeted(name: str, targets: list[str] | str) -> bool:
    """PEFT's rule: a pattern matches the whole name, an entry of a list matches it or its ending."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def load_adapter(folder: Path) -> Adapter:
    """Read a PEFT LoRA folder: ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        FileNotFoundError: one of them is missing.
        ValueError: an option that changes the result and is not honoured, tensors that are no A and B of the
            given rank, a value that is not finite, or all B zero (an adapter that was never trained).
    """
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder / name} is missing: an adapter folder has {CONFIG} and {WEIGHTS}")
    where = folder / CONFIG
    fields = json.loads(where.read_text())
    rank, alpha, targets, kind = required(fields, ["r", "lora_alpha", "target_modules", "peft_type"], where)
    refuse_unknown(fields, READ | IDLE, where)
    if kind != "LORA" or fields.get("init_lora_weights", True) not in INITIAL:
        name = "init_lora_weights" if kind == "LORA" else "peft_type"
        raise ValueError(f"{where}: {name} is {fields[name]!r}: only plain LoRA can be loaded")
    scale = alpha / math.sqrt(rank) if fields.get("use_rslora") else alpha / rank
    return Adapter(read_pairs(folder / WEIGHTS, rank), scale, targets, folder)


def read_pairs(path: Path, rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Module name -> (A, B) of an adapter's tensors, each pair whole, finite and of that rank."""
    sides: dict[str, dict[str, torch.Tensor]] = {"A": {}, "B": {}}
    unknown = []
    for name, data in stored([path]):
        found = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight", name)
        if found is None:
            unknown.append(name)
        else:
            sides[found[2]][found[1]] = data[:].float()
    a, b = sides["A"], sides["B"]
    tensors = [(f"{name}.lora_{side}", tensor) for side in sides for name, tensor in sides[side].items()]
    problems = {
        f"tensors not named {PREFIX}<module>.lora_<A or B>.weight": unknown,
        "A without B or B without A": list(a.keys() ^ b.keys()),
        f"not matrices of rank {rank}": [
            name for name, tensor in tensors if tensor.ndim != 2 or tensor.shape[0 if name.endswith("A") else 1] != rank
        ],
        "not finite": [name for name, tensor in tensors if not tensor.isfinite().all()],
    }
    refuse_misfits(problems, path)
    if not any(tensor.any() for tensor in b.values()):
        raise ValueError(f"{path} has no lora_B that is not zero: it changes nothing, so it was never trained")
    return {name: (a[name], b[name]) for name in a}
