"""Train a model of a study: ``python -m harness.train --study laptop --model student --results results/laptop``.

The result is a model folder (transformers layout, tokenizer, ``network.json``, ``training.json``,
``metrics.jsonl``). The state to resume from lives outside it, under ``state/``, in a folder named after
everything that decides the training, so that a changed study never continues an old run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

from backbone.cli import run
from backbone.examples import Examples
from backbone.network import DESCRIPTION
from backbone.pretraining import autoregressive_loss, new_model, teacher_loss
from backbone.training import fit
from d2f.distillation import student_loss
from harness.command import study_options
from harness.provenance import WEIGHTS, file_digest, provenance
from harness.results import write_result, write_text
from harness.study import Model, Study


def load_module(folder: Path):
    """A transformers module for training, float32, safetensors only."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", use_safetensors=True, attn_implementation="sdpa", local_files_only=True
    )


def load_tokenizer(folder: Path):
    """The tokenizer of a model folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def fingerprint(model: Model, data: Path, start: Path | None, answer_length: int) -> str:
    """What decides a training: its settings, its data and the weights it starts from."""
    parts = [json.dumps(dataclasses.asdict(model), sort_keys=True), file_digest(data), str(answer_length)]
    parts += [file_digest(start / WEIGHTS)] if start else []
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def train(study: Study, name: str, results: Path) -> tuple:
    """Run the training of model ``name``: the module, its tokenizer, the outcome, the state folder."""
    from harness.tasks.tokenizer import make_tokenizer

    model, data = study.models[name], results / "data" / "train.jsonl"
    start = results / "models" / model.start if model.start else None
    tokenizer = load_tokenizer(start) if start else make_tokenizer()
    examples = Examples(data, tokenizer, study.task.answer_length)
    mask_id, size = tokenizer.mask_token_id, model.training.batch_size
    module = load_module(start) if start else new_model(model.shape, tokenizer, model.training.seed)
    module = module.to(study.device)
    if model.kind == "autoregressive":
        loss = autoregressive_loss(examples, size)
    elif model.kind == "teacher":
        loss = teacher_loss(examples, size, mask_id, model.noise)
    else:
        teacher = load_module(start).to(study.device).eval().requires_grad_(False)
        loss = student_loss(examples, size, teacher, mask_id, model.distillation)
    state = results / "state" / f"{name}-{fingerprint(model, data, start, study.task.answer_length)}"
    outcome = fit(module, loss, model.training, state, f"train {name}")
    return module, tokenizer, outcome, state


def save(study_name: str, study: Study, name: str, results: Path) -> None:
    """Train and write the model folder."""
    module, tokenizer, outcome, state = train(study, name, results)
    model, folder = study.models[name], results / "models" / name
    scratch = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    module.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    diffusion = model.kind != "autoregressive"
    network = {
        "mask_id": tokenizer.mask_token_id if diffusion else None,
        "end_ids": [tokenizer.eos_token_id],
        "shift": not diffusion,
    }
    write_text(scratch / DESCRIPTION, json.dumps(network) + "\n")
    if model.kind == "student":
        settings = study.systems[model.measured_by].settings
        decoding = {"max_new_tokens": study.task.max_new_tokens, "settings": settings}
        write_text(scratch / "decoding.json", json.dumps(decoding) + "\n")
    shutil.copy(state / "metrics.jsonl", scratch / "metrics.jsonl")
    values = {
        "model": name,
        **outcome,
        "vocabulary": len(tokenizer),
        "sha256": file_digest(scratch / WEIGHTS),
        "settings": dataclasses.asdict(model),
        **provenance(study_name, study),
    }
    write_result(scratch / "training.json", "d2f-suite/training", values)
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)
    shutil.rmtree(state)


def main(argv: list[str]) -> None:
    options = study_options(__doc__, argv, "model")
    save(options.study, options.loaded, options.model, options.results)


if __name__ == "__main__":
    run(main)
