"""A folder of reference vectors, file by file: what each is called decides how it is checked.

The layout is that of ``tests/data/vectors``: one folder per checkpoint with its config, weights and what
was recorded on them. A file that is not known here is an error, never a pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from backbone.network import FORWARDS, Network, load_network
from harness.conformance import generation, units

GENERATIONS = {  # (file, shifted logits) -> (system, how a case is read)
    ("vanilla.json", False): ("LLaDA vanilla", generation.llada),
    ("vanilla.json", True): ("Dream vanilla", generation.dream),
    ("fast-dllm.json", False): ("Fast-dLLM LLaDA", generation.fast_dllm_llada),
    ("fast-dllm.json", True): ("Fast-dLLM Dream", generation.fast_dllm_dream),
    ("dkv-cache-decode.json", False): ("dKV-Cache LLaDA decode", generation.dkv_decode_llada),
    ("dkv-cache-greedy.json", False): ("dKV-Cache LLaDA greedy", generation.dkv_greedy_llada),
    ("dkv-cache.json", True): ("dKV-Cache Dream", generation.dkv_dream),
    ("dkv-cache-pd.json", True): ("dKV-Cache Dream", generation.dkv_dream),
    ("d2f.json", False): ("D2F LLaDA", generation.d2f),
    ("d2f.json", True): ("D2F Dream", generation.d2f),
}
PARTS = {"config.json", "model.safetensors"}  # read when their checkpoint is
TOP = {"README.md", "d2f-masks.safetensors", "d2f-noise-schedule.safetensors"}
MIXED = {"logits.safetensors", "logits-block-causal.safetensors", "transfer-schedule.json", "gumbel.safetensors",
         "selection-units.safetensors", "d2f-train.json", "d2f-train.safetensors"}  # fmt: skip


@dataclass
class Check:
    """What was compared for one system or piece.

    Args:
        what: the system or piece.
        against: where the expected values came from.
        held: comparisons that held.
        failures: one line for each that did not.
    """

    what: str
    against: str
    held: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, outcomes: Iterator[str | None]) -> Check:
        for line in outcomes:
            if line is None:
                self.held += 1
            else:
                self.failures.append(line)
        return self


def check_vectors(root: Path) -> Iterator[Check]:
    """Check every file below ``root``.

    Raises:
        FileNotFoundError: no vectors there.
        ValueError: a file, key or field that this kit does not know.
    """
    files = sorted(path for path in root.rglob("*") if path.is_file())
    if not files:
        raise FileNotFoundError(f"{root} holds no reference vectors: give a folder like tests/data/vectors")
    folders = sorted({path.parent for path in files if path.name == "config.json"})
    for path in files:
        refuse_unknown(path, root, folders)
    for name, check in (("d2f-masks", units.masks), ("d2f-noise-schedule", units.noise)):
        path = root / f"{name}.safetensors"
        if path.exists():
            yield Check(name.replace("-", " ").replace("d2f", "D2F"), str(path.relative_to(root))).add(check(path))
    for folder in folders:
        yield from check_folder(folder, root)


def refuse_unknown(path: Path, root: Path, folders: list[Path]) -> None:
    """One line for a file that nobody would look at."""
    known = {name for name, _ in GENERATIONS} | MIXED | PARTS
    inside = path.parent in folders and path.name in known
    beside = (path.parent / "checkpoint") in folders and path.name in {"cases.json", "logits.safetensors"}
    adapter = path.parent.name == "lora" and path.parent.parent in folders
    adapter = adapter and path.name in {"adapter_config.json", "adapter_model.safetensors"}
    top = (path.parent == root and path.name in TOP) or path.name == "README.md"
    if not (inside or beside or adapter or top):
        raise ValueError(f"{path}: this kit does not know such a file, so it cannot vouch for it: remove it")


def check_folder(folder: Path, root: Path) -> Iterator[Check]:
    """Everything recorded on one checkpoint."""
    networks = {forward: load_network(folder, forward=forward) for forward in FORWARDS}
    network, here = networks["lean"], str(folder.relative_to(root))
    for name in ("logits", "logits-block-causal"):
        path = folder / f"{name}.safetensors"
        if path.exists():
            yield Check(f"checkpoint {here}", f"{here}/{path.name}").add(units.logits(path, networks))
    singles = {
        "transfer-schedule.json": units.transfer_schedule,
        "gumbel.safetensors": units.gumbel_noise,
        "selection-units.safetensors": lambda path: units.selection(path, network.mask_id),
        "d2f-train.json": lambda path: units.training(path, folder),
    }
    names = {"transfer-schedule.json": "quotas", "gumbel.safetensors": "Gumbel noise"}
    names |= {"selection-units.safetensors": "selection rules", "d2f-train.json": "distillation loss and gradients"}
    for name, check in singles.items():
        path = folder / name
        if path.exists():
            yield Check(names[name], f"{here}/{name}").add(check(path))
    for (name, shift), (system, read) in GENERATIONS.items():
        path = folder / name
        if path.exists() and shift == network.shift:
            yield Check(system, f"{here}/{name}").add(check_generations(path, network, read))
        elif path.exists() and (name, network.shift) not in GENERATIONS:
            raise ValueError(f"{path}: no such system for this family: remove it")
    cases = folder.parent / "cases.json"
    if folder.name == "checkpoint" and cases.exists():
        family = "Dream" if network.shift else "LLaDA"
        yield Check(f"dLLM-Cache {family}", str(cases.relative_to(root))).add(check_features(cases, network))


def check_generations(path: Path, network: Network, read) -> Iterator[str | None]:
    """Every case of a file of generations."""
    listed = json.loads(path.read_text())
    units.refuse(set(listed) - {"cases", "mask_id", "eos_id", "eot_id", "max_length"}, path)
    if listed["mask_id"] != network.mask_id:
        raise ValueError(f"{path}: mask_id {listed['mask_id']}, but its checkpoint says {network.mask_id}")
    for case in listed["cases"]:
        _, difference = generation.run_case(read(case, listed.get("eot_id")), network)
        yield difference or None


def check_features(path: Path, network: Network) -> Iterator[str | None]:
    """Every case of dLLM-Cache's ``cases.json``: tokens, positions, forwards, selections, and recorded logits."""
    beside = path.with_name("logits.safetensors")
    stored = load_file(beside) if beside.exists() else {}
    kinds = ("last_step_response_logits", "response_logits_steps_1_to_5")
    for group in json.loads(path.read_text()).values():
        for case, raw in generation.dllm_cache(group, network.shift):
            wanted = {kind: stored.pop(f"{case.name}.{kind}", None) for kind in kinds}
            yield from check_feature_case(case, raw, wanted, network)
    units.refuse(set(stored), beside)


def check_feature_case(case: generation.Case, raw: dict, wanted: dict, network: Network) -> Iterator[str | None]:
    """One case of :func:`check_features`."""
    selected, seen, before = [], [], network.forwards

    def prepare(decoder) -> None:
        decoder.watch = lambda call, layer, places: selected.append((call, layer, places.tolist()))
        keep_logits(decoder, seen)

    traces, difference = generation.run_case(replace(case, prepare=prepare), network)
    yield difference or None
    start = len(case.prompt[0])
    if filled := raw.get("filled_positions_per_step"):
        got = [[[p - start for p in trace.steps[i].positions] for trace in traces] for i in range(len(filled))]
        yield None if got == filled else f"{case.name}: other positions"
    if raw["cache"]:
        calls = network.forwards - before
        yield None if calls == raw["model_calls"] else f"{case.name}: {calls} forwards, not {raw['model_calls']}"
        listed = [s for s in raw.get("selected", []) if s.get("stream", "no_cfg") == "no_cfg"]
        same = [s[:2] for s in selected] == [(s["step"], s["layer"]) for s in listed]
        same = same and all(s["idx"] in (None, mine[2]) for s, mine in zip(listed, selected, strict=True))
        yield None if same else f"{case.name}: other rows selected"
    first, last = wanted["response_logits_steps_1_to_5"], wanted["last_step_response_logits"]
    if first is not None:
        yield units.compare(f"{case.name}, logits of steps 1-5", torch.stack(seen[:5]), first, units.CLOSE)
    if last is not None:
        yield units.compare(f"{case.name}, last logits", seen[-1], last, units.CLOSE)


def keep_logits(decoder, seen: list[torch.Tensor]) -> None:
    """Make ``decoder`` ask for the whole answer at each step and keep its logits (rows, R, V) in ``seen``."""
    policy = decoder.forward

    def forward(canvas):
        inner = policy(canvas)

        def step(number: int, asked: list[int]):
            logits, fed = inner(number, list(range(canvas.start, canvas.end)))
            seen.append(logits.clone())
            return logits[:, [position - canvas.start for position in asked]], fed

        return step

    decoder.forward = forward
