"""``fit``: the one training loop of the project, on accelerate.

Everything random about step ``n`` comes from a generator seeded with ``(seed, n)``, so the state to
resume from is the weights, the optimizers and the step number, and a run that was killed continues
with exactly the numbers an uninterrupted one would have had. Progress goes to stderr, and one JSON
line per report to ``metrics.jsonl`` beside the state.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from backbone.muon import Muon
from backbone.progress import Progress

SEED_STRIDE = 1_000_003  # more steps than any training has: seeds never share a step's numbers
Loss = Callable[[torch.nn.Module, int, torch.Generator], tuple[torch.Tensor, int]]


@dataclass(frozen=True)
class Recipe:
    """How to optimise.

    Args:
        steps: optimizer steps.
        batch_size: samples per step.
        learning_rate: AdamW's peak rate (embeddings, norms; everything when ``muon_rate`` is 0).
        muon_rate: Muon's peak rate for the 2-D weights inside the layers; 0 turns Muon off.
        warmup: steps of linear warm-up; afterwards a cosine falls to ``floor`` times the peak.
        floor: last rate as a share of the peak (1 = constant).
        clip: largest gradient norm.
        seed: of the batches and the noise.
        threads: CPU threads; part of the recipe, since sums differ in the last bit between counts.
        save_every: steps between resumable states.
        report_every: steps between progress and metrics lines.
    """

    steps: int
    batch_size: int = 16
    learning_rate: float = 2e-3
    muon_rate: float = 5e-3
    warmup: int = 50
    floor: float = 0.05
    clip: float = 1.0
    seed: int = 1
    threads: int = 2
    save_every: int = 100
    report_every: int = 20

    def __post_init__(self) -> None:
        for key in ("steps", "batch_size", "threads", "save_every", "report_every"):
            if getattr(self, key) < 1:
                raise ValueError(f"training.{key} is {getattr(self, key)}: give a whole number of at least 1")
        for key in ("learning_rate", "muon_rate", "floor", "clip"):
            if not math.isfinite(getattr(self, key)) or getattr(self, key) < 0:
                raise ValueError(f"training.{key} is {getattr(self, key)}: give a finite number of at least 0")


def schedule(recipe: Recipe) -> Callable[[int], float]:
    """The factor on the peak rate at a step: linear warm-up, then cosine down to ``floor``."""

    def factor(step: int) -> float:
        if step < recipe.warmup:
            return (step + 1) / recipe.warmup
        done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
        return recipe.floor + (1 - recipe.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor


def optimizers(model: torch.nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices inside the layers and AdamW for the rest."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in trainable if recipe.muon_rate and p.ndim == 2 and ".layers." in name]
    rest = [p for _, p in trainable if not any(p is m for m in matrices)]
    found = [torch.optim.AdamW(rest, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)]
    if matrices:
        found.append(Muon(matrices, lr=recipe.muon_rate))
    return found


def step_generator(seed: int, step: int) -> torch.Generator:
    """The source of everything random at one step.

    torch's CPU generator keeps the low 32 bits of its seed only, so both numbers have to fit into those.
    """
    return torch.Generator().manual_seed(((seed - 1) * SEED_STRIDE + step) % 2**32)


def fit(model: torch.nn.Module, loss: Loss, recipe: Recipe, folder: Path, label: str) -> dict[str, float]:
    """Train ``model`` in place and return ``{"loss", "seconds", "tokens_per_second"}``.

    Args:
        model: the trainable module.
        loss: ``(model, step, generator) -> (scalar loss, tokens in the batch)``.
        recipe: see :class:`Recipe`.
        folder: keeps ``state.pt`` (resumed from when it is there) and ``metrics.jsonl``.
        label: what the progress lines call this training.

    Raises:
        FloatingPointError: the loss is no longer finite; names the step and the last good state.
    """
    from accelerate import Accelerator

    torch.set_num_threads(recipe.threads)
    folder.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    engines = optimizers(model, recipe)
    decays = [torch.optim.lr_scheduler.LambdaLR(engine, schedule(recipe)) for engine in engines]
    state = _State(folder, model, engines, decays)
    start, spent = state.load()
    model, *engines = accelerator.prepare(model, *engines)
    model.train()
    progress = Progress(label, recipe.steps, "step", start=start)
    begun, tokens, value = time.perf_counter() - spent, 0, float("nan")
    since = time.perf_counter()
    for step in range(start, recipe.steps):
        batch_loss, count = loss(model, step, step_generator(recipe.seed, step))
        accelerator.backward(batch_loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), recipe.clip)
        for engine, decay in zip(engines, decays, strict=True):
            engine.step()
            decay.step()
            engine.zero_grad(set_to_none=True)
        tokens += count
        done = step + 1
        reports = done % recipe.report_every == 0 or done == recipe.steps
        saves = done % recipe.save_every == 0 and done < recipe.steps
        if reports or saves:  # reading the loss waits for the device, so not at every step
            value = float(batch_loss.detach())
            if not math.isfinite(value + float(norm)):
                kept = (
                    f"the last good state is {state.path} (step {state.saved})"
                    if state.saved
                    else "no state was saved yet"
                )
                raise FloatingPointError(
                    f"{label}: the loss is {value} at step {done}, the norm of its gradient {float(norm)}; {kept}: "
                    "lower the learning rate and run again"
                )
        if reports:
            seconds = time.perf_counter() - begun
            rate = tokens / (time.perf_counter() - since)
            state.log(step=done, loss=value, gradient_norm=float(norm), tokens_per_second=rate, seconds=seconds)
            progress.at(done, f"loss {value:.4f}, {rate:,.0f} tokens/s")
            tokens, since = 0, time.perf_counter()
        if saves:
            state.save(done, time.perf_counter() - begun)
    seconds = time.perf_counter() - begun
    progress.done(f"loss {value:.4f}")
    return {"loss": value, "seconds": seconds, "tokens_per_second": rate if start < recipe.steps else 0.0}


def logged_step(line: str) -> float:
    """The step of a line of ``metrics.jsonl``; infinite when the line was cut off by a kill."""
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:
        return math.inf


class _State:
    """The resumable state in ``folder``: written to a temporary name and renamed, so never half there."""

    def __init__(self, folder: Path, model, engines: list, decays: list) -> None:
        self.path, self.metrics = folder / "state.pt", folder / "metrics.jsonl"
        self.model, self.engines, self.decays = model, engines, decays
        self.saved = 0

    def load(self) -> tuple[int, float]:
        """Restore everything and return (steps done, seconds spent); (0, 0.0) when there is no state."""
        if not self.path.exists():
            self.metrics.write_text("")
            return 0, 0.0
        held = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(held["model"])
        for part, values in zip(self.engines + self.decays, held["parts"], strict=True):
            part.load_state_dict(values)
        self.saved = held["step"]
        kept = [line for line in self.metrics.read_text().splitlines() if logged_step(line) <= self.saved]
        self.metrics.write_text("".join(line + "\n" for line in kept))
        return self.saved, held["seconds"]

    def save(self, step: int, seconds: float) -> None:
        parts = [part.state_dict() for part in self.engines + self.decays]
        scratch = self.path.with_suffix(".tmp")
        torch.save({"model": self.model.state_dict(), "parts": parts, "step": step, "seconds": seconds}, scratch)
        os.replace(scratch, self.path)
        self.saved = step

    def log(self, **values: float) -> None:
        with self.metrics.open("a") as file:
            file.write(json.dumps(values) + "\n")
