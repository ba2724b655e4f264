"""Result files: JSON with a schema name and a version, written whole or not at all, refused when unknown."""

from __future__ import annotations

import json
import os
from pathlib import Path

SCHEMAS = {"d2f-suite/training": 1, "d2f-suite/result": 1, "d2f-suite/summary": 1}


def write_text(path: Path, text: str) -> None:
    """Write a file by renaming, so that nobody ever reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(text)
    os.replace(scratch, path)


def write_result(path: Path, schema: str, values: dict) -> None:
    """Write ``values`` under a schema of :data:`SCHEMAS`; NaN and infinity are refused."""
    head = {"schema": schema, "version": SCHEMAS[schema]}
    write_text(path, json.dumps({**head, **values}, indent=1, allow_nan=False) + "\n")


def read_result(path: Path, schema: str) -> dict:
    """Read a result file.

    Raises:
        ValueError: cut off, of another schema, or of a version this suite does not read.
    """
    try:
        values = json.loads(path.read_text())
    except json.JSONDecodeError:
        raise ValueError(f"{path} is cut off or not JSON: delete it and run again") from None
    found = (values.get("schema"), values.get("version")) if isinstance(values, dict) else None
    if found != (schema, SCHEMAS[schema]):
        raise ValueError(
            f"{path} is {found}, but this suite reads ({schema!r}, {SCHEMAS[schema]}): delete it and run again"
        )
    return values
