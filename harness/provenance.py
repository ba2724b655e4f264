"""Where a number comes from: commit, study, machine, versions. Every result file carries this."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from harness.study import Study, digest

WEIGHTS = "model.safetensors"  # of a model folder
LIBRARIES = ("torch", "transformers", "accelerate", "lm_eval", "snakemake")


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def commit() -> str:
    """The commit of the working tree, with ``+`` behind it when sources differ from it."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown (not a git checkout)"
    return head + ("+" if changed.stdout.strip() else "")


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine(study: Study) -> dict:
    """What must be the same for two speeds to be compared."""
    import torch

    device = study.device if study.device == "cpu" else torch.cuda.get_device_name(study.device)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30),
        "device": device,
        "dtype": study.dtype,
        "threads": study.threads,
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in LIBRARIES},
    }


def provenance(study_name: str, study: Study) -> dict:
    """The block that every result file carries."""
    return {"study": study_name, "study_digest": digest(study), "commit": commit(), "machine": machine(study)}
