"""Recorded pieces: logits, masks, noise, selection steps and the distillation loss, against the public code.

Each function reads one vector file and yields one line per comparison that fails; it refuses keys it does
not know. ``None`` is yielded for a comparison that holds, so that they can be counted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.func import functional_call

from backbone.adapters import load_adapter, named_matrices
from backbone.network import Network, load_network
from backbone.pretraining import everything_visible
from backbone.sampling import gumbel, predictions
from backbone.selection import best_and_at_least, factor_rule, most_confident, quotas
from d2f.blocks import additive_visibility
from d2f.distillation import distillation_loss
from d2f.noise import monotone

Outcomes = Iterator[str | None]
EXACT, CLOSE = 1e-5, 1e-4  # float32 by the same operations; in another precision, or summed in another order
PLAIN = 4.0


def compare(name: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float = 0.0) -> str | None:
    """None, or one line on how far ``got`` is from ``wanted``.

    ``tolerance`` holds for values up to ``PLAIN`` and grows with larger ones: float32 has so many digits and
    no more, and kernels for other instruction sets sum in another order.
    """
    if got.shape != wanted.shape:
        return f"{name}: shape {tuple(got.shape)}, not {tuple(wanted.shape)}"
    if not wanted.numel():
        return None
    wanted = wanted.double()
    off = float((got.double() - wanted).abs().max())
    allowed = tolerance * max(1.0, float(wanted.abs().max()) / PLAIN)
    return None if off <= allowed else f"{name}: off by {off:.2g}, more than {allowed:.2g}"


def refuse(keys: set[str], path: Path) -> None:
    """An error that names what this kit does not know."""
    if keys:
        raise ValueError(f"{path}: unknown key {', '.join(sorted(keys)[:3])}: this kit cannot check it")


def every_logit(network: Network, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """(rows, L, V) of all positions, row by row as the network computes them (Dream: unshifted)."""
    length = ids.shape[1]
    with torch.inference_mode():
        hidden = network.run(ids, slice(0, length), network.cache(len(ids), length), length, mask)
        return network.logits(hidden, length)


def logits(path: Path, networks: dict[str, Network]) -> Outcomes:
    """``logits.safetensors`` and ``logits-block-causal.safetensors``, through every forward."""
    stored = load_file(path)
    with safe_open(path, "pt") as file:
        notes = file.metadata() or {}
    keys = set(stored) - {"input_ids"}
    full = {"logits_float32", "logits_float64", "logits_float64_rope_float64"}
    refuse(keys - full - {"logits_block_causal"}, path)
    for forward, network in networks.items():
        for key in sorted(keys):
            mask = None
            if key == "logits_block_causal":
                length = stored["input_ids"].shape[1]
                mask = additive_visibility(int(notes["prompt_length"]), length, int(notes["block_size"]))
            got = every_logit(network, stored["input_ids"], mask)
            wanted = stored[key][..., : got.shape[-1]]  # the rest only pads the vocabulary
            yield compare(f"{key}, {forward} forward", got, wanted, CLOSE if "float64" in key else EXACT)


def masks(path: Path) -> Outcomes:
    """``d2f-masks.safetensors``: who sees whom, whole and cut out for a cached prefix."""
    shape = re.compile(r"(infer|train|extract)_P([\d-]+)_L(\d+)_B(\d+)(?:_start(\d+)_len(\d+)_cache(\d+))?$")
    for name, wanted in load_file(path).items():
        found = shape.match(name)
        if not found:
            refuse({name}, path)
        kind, prompts, length, block = found[1], [int(p) for p in found[2].split("-")], int(found[3]), int(found[4])
        got = (additive_visibility(torch.tensor(prompts), length, block) == 0).to(torch.uint8)
        if kind == "extract":
            start, count, cached = (int(number) for number in found.groups()[4:])
            columns = [*range(cached), *range(start, start + count)]
            got = got[0, start : start + count][:, columns]
        yield compare(name, got[0] if kind == "infer" else got, wanted)


def noise(path: Path) -> Outcomes:
    """``d2f-noise-schedule.safetensors``: the authors' monotone ratios, given the uniforms."""
    stored = load_file(path)
    cases = {name.split(".")[0] for name in stored}
    refuse(set(stored) - {f"{i}.{part}" for i in cases for part in ("u_first", "u_steps", "ratios")}, path)
    for i in sorted(cases):
        got = monotone(stored[f"{i}.u_first"], stored[f"{i}.u_steps"], 0.2, 0.7)
        yield compare(f"schedule {i}", got, stored[f"{i}.ratios"], 1e-6)


def transfer_schedule(path: Path) -> Outcomes:
    """``transfer-schedule.json``: tokens to commit per step."""
    for case in json.loads(path.read_text()):
        refuse(set(case) - {"mask_counts", "steps", "schedule"}, path)
        got = [quotas(count, case["steps"]) for count in case["mask_counts"]]
        yield None if got == case["schedule"] else f"{case['mask_counts']} in {case['steps']} steps: {got}"


def gumbel_noise(path: Path) -> Outcomes:
    """``gumbel.safetensors``: the float64 noise, given the uniforms."""
    stored = load_file(path)
    heats = {name.split("_T")[1] for name in stored if "_T" in name}
    parts = ("uniform", "perturbed", "argmax")
    refuse(set(stored) - {"logits"} - {f"{part}_T{heat}" for heat in heats for part in parts}, path)
    for heat in sorted(heats):
        got = gumbel(stored["logits"], float(heat), stored[f"uniform_T{heat}"])
        wanted = stored[f"perturbed_T{heat}"]
        yield compare(f"noise at {heat}", got / wanted, torch.ones_like(wanted), 1e-9)
        yield compare(f"argmax at {heat}", got.argmax(-1), stored[f"argmax_T{heat}"])


RULES = {
    "count": lambda c, value: most_confident(c, int(value)),
    "threshold": best_and_at_least,
    "factor": factor_rule,
}


def selection(path: Path, mask_id: int) -> Outcomes:
    """``selection-units.safetensors``: one selection step of each rule."""
    stored = load_file(path)
    names = sorted(name.removeprefix("transfer_") for name in stored if name.startswith("transfer_"))
    refuse(
        set(stored) - {"logits", "mask_index", "tokens"} - {f"{p}_{n}" for n in names for p in ("x0", "transfer")}, path
    )
    refuse({name for name in names if name.split("_")[0] not in RULES}, path)
    masked = stored["mask_index"]
    unused = mask_id if mask_id < stored["logits"].shape[-1] else -1  # these logits are narrower than the vocabulary
    for name in names:
        logits = stored["logits"].clone()
        if unused < 0:
            logits = torch.cat([logits, logits.new_full((*logits.shape[:-1], 1), -1e9)], dim=-1)
        tokens, confidences = predictions(logits, unused)
        rule, value = name.split("_")
        chosen = torch.zeros_like(masked)
        for row, own in enumerate(masked):
            places = own.nonzero()[:, 0].tolist()
            picked = RULES[rule](confidences[row, own].tolist(), float(value))
            chosen[row, [places[i] for i in picked]] = True
        yield compare(f"{name}, positions", chosen, stored[f"transfer_{name}"])
        filled = torch.where(masked, tokens, stored["tokens"])
        yield compare(f"{name}, tokens", filled, torch.where(masked, stored[f"x0_{name}"], stored["tokens"]))


def training(path: Path, folder: Path) -> Outcomes:
    """``d2f-train``: student and teacher logits, loss in the code's mode, and the gradients of the adapter."""
    listed, stored = json.loads(path.with_suffix(".json").read_text()), load_file(path.with_suffix(".safetensors"))
    refuse(set(listed) - {"mask_id", "eos_id", "shift_logits", "cases"}, path)
    base, adapter = load_network(folder, forward="module"), load_adapter(folder / "lora")
    module = base.module
    for case in listed["cases"]:
        number = case["case"]
        held = {key.split(".", 1)[1]: value for key, value in stored.items() if key.startswith(f"{number}.")}
        yield from training_case(f"case {number}", case, held, module, adapter, listed["shift_logits"])


def training_case(name: str, case: dict, held: dict, module, adapter, shift: bool) -> Outcomes:
    """One batch of :func:`training`."""
    noisy, masked = held["noisy_ids"], held["masked"].bool()
    blocks = additive_visibility(held["prompt_lengths"], noisy.shape[1], case["block_size"])[:, None]
    names = {id(weight): full for full, weight in module.named_parameters()}
    leaves = {key: [part.clone().requires_grad_() for part in pair] for key, pair in adapter.pairs.items()}
    weights = named_matrices(module, set(leaves))
    tuned = {names[id(weights[key])]: weights[key] + adapter.scale * (b @ a) for key, (a, b) in leaves.items()}
    inputs = {"input_ids": noisy, "use_cache": False}
    student = functional_call(module, tuned, kwargs=inputs | {"attention_mask": blocks}).logits
    with torch.no_grad():
        teacher = module(**inputs, attention_mask=everything_visible(noisy, module)).logits
    yield compare(f"{name}, student", student.detach(), held["student_logits"], CLOSE)
    yield compare(f"{name}, teacher", teacher, held["teacher_logits"], CLOSE)
    rows = masked.roll(-1, dims=1) if shift else masked
    ratios = held["p_mask"][masked]
    loss = distillation_loss(student[rows], teacher[rows], ratios)
    labels = distillation_loss(student[rows], held["input_ids"][masked], ratios)
    for key, value in (("loss_distill", loss), ("loss_data", labels)):
        near = math.isclose(float(value.detach()), case[key], rel_tol=1e-4)
        yield None if near else f"{name}, {key}: {float(value.detach()):.6f}, not {case[key]:.6f}"
    gradients = torch.autograd.grad(loss, [part for pair in leaves.values() for part in pair])
    norm = float(torch.stack([g.norm() for g in gradients]).norm())
    near = math.isclose(norm, case["grad_norm_all_lora_distill"], rel_tol=1e-3)
    yield None if near else f"{name}, gradient norm: {norm:.6f}, not {case['grad_norm_all_lora_distill']:.6f}"
    found = {
        f"{key}.lora_{side}": g
        for key, pair in zip(leaves, chunked(gradients), strict=True)
        for side, g in zip("AB", pair, strict=True)
    }
    for key, wanted in held.items():
        if key.startswith("grad."):
            got = found[key.removeprefix("grad.base_model.model.").removesuffix(".weight")]
            yield compare(f"{name}, {key}", got, wanted, 1e-3 * float(wanted.abs().max()))


def chunked(values: tuple) -> list[tuple]:
    """Consecutive pairs."""
    return list(zip(values[::2], values[1::2], strict=True))
