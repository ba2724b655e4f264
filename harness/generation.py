"""One system on one task, through lm-eval: score, samples and traces of the same tokens.

``python -m harness.generation --study laptop --system d2f --results results/laptop``
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path

import torch

from backbone.cli import run
from backbone.network import Network, load_network
from backbone.trace import Trace, write_traces
from harness.accounting import Counts, count, rates
from harness.command import study_options
from harness.provenance import WEIGHTS, file_digest, provenance
from harness.results import write_result
from harness.statistics import accuracy_interval
from harness.study import Study, System
from harness.systems import make_decoder
from harness.train import load_tokenizer

FINAL = "exact_match,final-number"


def load_system(study: Study, system: System, results: Path) -> Network:
    """The network of a system."""
    folder = results / "models" / system.model
    return load_network(folder, forward=system.forward, device=study.device, dtype=study.dtype)


def evaluate(model, study: Study, system: System, results: Path) -> dict:
    """Run lm-eval's ``simple_evaluate`` on the study's local task; nothing is asked of any hub."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from tqdm import tqdm

    tqdm.__init__ = functools.partialmethod(tqdm.__init__, disable=True)  # lm-eval has no switch for its bars
    seed = study.task.seed
    return simple_evaluate(
        model=model,
        tasks=[study.task.name],
        task_manager=TaskManager(include_path=str(results / "data"), include_defaults=False),
        limit=system.problems or None,
        bootstrap_iters=0,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
        verbosity="ERROR",
    )


def fingerprint(study: Study, system: System, results: Path) -> str:
    """Everything that decides the tokens of a system."""
    parts = [
        json.dumps(system.settings, sort_keys=True),
        f"{system.decoder} {system.forward} {study.device} {study.dtype} {study.threads} {study.task.max_new_tokens}",
        file_digest(results / "models" / system.model / WEIGHTS),
        file_digest(results / "data" / f"{study.split}.jsonl"),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def generate(study_name: str, study: Study, name: str, results: Path) -> None:
    """Decode, score and store: ``generate/<system>.json`` and ``generate/<system>.traces.jsonl``."""
    from harness.language_model import DecoderLM

    torch.set_num_threads(study.threads)
    system = study.systems[name]
    network = load_system(study, system, results)
    decoder = make_decoder(system.decoder, system.settings, network)
    tokenizer = load_tokenizer(results / "models" / system.model)
    partial = results / "state" / f"generate-{name}.jsonl"
    model = DecoderLM(
        decoder,
        network,
        tokenizer,
        study.task.max_new_tokens,
        f"generate {name}",
        partial,
        fingerprint(study, system, results),
    )
    found = evaluate(model, study, system, results)
    correct = {s["doc_id"]: bool(s["exact_match"]) for s in found["samples"][study.task.name]}
    docs = {s["doc_id"]: s["doc"] for s in found["samples"][study.task.name]}
    targets = {s["doc_id"]: s["target"] for s in found["samples"][study.task.name]}
    records = [
        {
            "id": number,
            "question": docs[number]["question"],
            "target": targets[number],
            "correct": correct[number],
            **{key: record[key] for key in ("text", "useful", "trace")},
        }
        for number, record in sorted(model.records.items())
        if number in correct
    ]
    total = sum((count(Trace.from_json(r["trace"]), r["useful"], network.end_ids) for r in records), Counts())
    values = {
        "system": name,
        "decoder": system.decoder,
        "model": system.model,
        "forward": system.forward,
        "settings": dict(system.settings),
        "sweep": system.sweep or None,
        "task": study.task.name,
        "split": study.split,
        "problems": len(records),
        "correct": sum(correct.values()),
        "accuracy": float(found["results"][study.task.name][FINAL]),
        "accuracy_interval": accuracy_interval(sum(correct.values()), len(records), study.statistics.confidence),
        "counts": total.to_json(),
        "rates": rates(total, len(records)),
        "peak_memory_bytes": model.peak_memory,
        "parameters": sum(p.numel() for p in network.module.parameters()),
        "end_ids": list(network.end_ids),
        "lm_eval": {"results": found["results"][study.task.name], "versions": found["versions"]},
        **provenance(study_name, study),
    }
    folder = results / "generate"
    folder.mkdir(parents=True, exist_ok=True)
    write_traces(folder / f"{name}.traces.jsonl", records, system=name)
    write_result(folder / f"{name}.json", "d2f-suite/result", json.loads(json.dumps(values, default=float)))
    partial.unlink()


def main(argv: list[str]) -> None:
    options = study_options(__doc__, argv, "system")
    generate(options.study, options.loaded, options.system, options.results)


if __name__ == "__main__":
    run(main)
