"""The model card of a model that a study trained: what it is, where it comes from, how good it is.

``python -m harness.card --study laptop-pretrain --model teacher`` writes ``models/<name>/README.md``.
"""

from __future__ import annotations

from backbone.cli import run
from harness.command import study_options
from harness.results import read_result, write_text
from harness.study import Model, Study

KINDS = {
    "autoregressive": "Autoregressive Llama model, trained from scratch on generated word problems.",
    "teacher": "Bidirectional masked-diffusion Llama model (LLaDA's recipe), trained from the weights of `{start}`.",
    "student": "Block-causal diffusion Llama model, distilled by D2F (arXiv:2508.09192) from `{start}`.",
}

CARD = """\
---
license: apache-2.0
library_name: transformers
---
# {name}

{kind}

| | |
|---|---|
| parameters | {parameters:,} |
| accuracy | {accuracy:.1%} on {problems} problems of the split `{split}`, by the system `{system}` |
| study | `{study}`, digest `{digest}` |
| commit | `{commit}` |
| seeds | problems {task_seed}, training {seed} |
| training | {steps} steps of {batch} samples, last loss {loss:.4f}, {seconds:.0f} s on {cpu}, {threads} threads |
| SHA-256 of model.safetensors | `{sha256}` |

The model knows nothing but these problems: its vocabulary is {words} words. It is meant for measuring
decoders, not for use. `network.json` holds what transformers' config has no place for: mask id, end ids,
and whether a row predicts its own position or the next.
"""


def card(name: str, model: Model, study: Study, training: dict, summary: dict) -> str:
    """The card as Markdown."""
    measured = summary["models"][name]
    return CARD.format(
        name=name,
        kind=KINDS[model.kind].format(start=model.start),
        parameters=measured["parameters"],
        accuracy=measured["accuracy"],
        problems=measured["problems"],
        split=summary["split"],
        system=measured["measured_by"],
        study=training["study"],
        digest=training["study_digest"],
        commit=training["commit"],
        task_seed=study.task.seed,
        seed=model.training.seed,
        steps=model.training.steps,
        batch=model.training.batch_size,
        loss=training["loss"],
        seconds=training["seconds"],
        cpu=training["machine"]["cpu"],
        threads=model.training.threads,
        sha256=training["sha256"],
        words=training["vocabulary"],
    )


def main(argv: list[str]) -> None:
    options = study_options(__doc__, argv, "model")
    name, folder = options.model, options.results / "models" / options.model
    training = read_result(folder / "training.json", "d2f-suite/training")
    summary = read_result(options.results / "summary.json", "d2f-suite/summary")
    text = card(name, options.loaded.models[name], options.loaded, training, summary)
    write_text(folder / "README.md", text)


if __name__ == "__main__":
    run(main)
