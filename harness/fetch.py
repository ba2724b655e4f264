"""Fetch a model of a study and verify it: ``python -m harness.fetch --study laptop --model teacher ...``.

The weights' SHA-256 is pinned in the study; a file that is not what the study names is never used.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from backbone.cli import run
from harness.command import study_options
from harness.provenance import WEIGHTS, file_digest
from harness.study import Model


def fetch(name: str, model: Model, folder: Path) -> None:
    """Copy the model folder ``model.source`` to ``folder`` once its hash is what the study says."""
    source = Path(model.source)
    if not (source / WEIGHTS).exists():
        raise FileNotFoundError(
            f"model {name}: {source / WEIGHTS} is missing: restore the folder, or run `make models`"
        )
    found = file_digest(source / WEIGHTS)
    if found != model.sha256:
        raise ValueError(
            f"model {name}: {source / WEIGHTS} has SHA-256 {found}, the study pins {model.sha256}: "
            "restore the file, or pin the new hash in the study if you trained it anew"
        )
    scratch = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(source, scratch)
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)


def main(argv: list[str]) -> None:
    options = study_options(__doc__, argv, "model")
    fetch(options.model, options.loaded.models[options.model], options.results / "models" / options.model)


if __name__ == "__main__":
    run(main)
