"""Settings of all tests: one thread, the root of the repository on the path, nothing from the network."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

from tests.checkout import copy_sources, snakemake


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny models run slower on more threads, and ``fit`` sets the number for its process."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smoke_run(tmp_path_factory):
    """An uninterrupted run of the study `smoke` in a clean checkout: its folder, and what the command printed."""
    folder = copy_sources(tmp_path_factory.mktemp("checkout"))
    done = snakemake(folder, "--cores", "2", "--config", "study=smoke")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done
