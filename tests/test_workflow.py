"""The whole thing: the smoke study through Snakemake, again, after being killed, and with a user's mistakes."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backbone.trace import read_traces
from harness.provenance import file_digest
from tests.checkout import copy_sources, snakemake

OUTPUTS = ["summary.json", "report.html", "mlflow_runs.csv", "tables/systems.md", "figures/trace.png"]


def outcome(folder: Path) -> dict:
    """What must be the same in every run: weights, tokens, scores."""
    results = folder / "results" / "smoke"
    found = {path.parent.name: file_digest(path) for path in sorted(results.glob("models/*/model.safetensors"))}
    for path in sorted(results.glob("generate/*.traces.jsonl")):
        _, records = read_traces(path)
        found[path.name] = [(r["id"], r["trace"].tokens, r["correct"]) for r in records]
    return found


def test_one_command_gives_every_output(smoke_run):
    folder, done = smoke_run
    for name in OUTPUTS:
        assert (folder / "results" / "smoke" / name).stat().st_size > 0
    assert "vanilla-paper" in done.stderr and "mlflow ui" in done.stderr and "report.html" in done.stderr


def test_every_system_is_published_once(smoke_run):
    folder, _ = smoke_run
    summary = json.loads((folder / "results" / "smoke" / "summary.json").read_text())
    with (folder / "results" / "smoke" / "mlflow_runs.csv").open() as file:
        names = [row["run_name"] for row in csv.DictReader(file) if row["experiment"].endswith("/systems")]
    assert all(names.count(system) == 1 for system in summary["systems"])


def test_a_second_run_does_nothing(smoke_run):
    folder, _ = smoke_run
    before = outcome(folder)
    again = snakemake(folder, "--cores", "2", "--config", "study=smoke")
    assert again.returncode == 0 and "Nothing to be done" in again.stderr
    assert outcome(folder) == before


def test_killed_at_random_moments_ends_with_the_same_results(smoke_run, tmp_path):
    folder = copy_sources(tmp_path)
    command = [sys.executable, "-m", "snakemake", "--cores", "2", "--config", "study=smoke"]
    seed = int(time.time())
    moments = random.Random(seed)
    for _ in range(3):
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(moments.uniform(4, 16))
        process.send_signal(signal.SIGKILL)  # Snakemake alone: its jobs must notice
        process.wait()
    done = snakemake(folder, "--cores", "2", "--config", "study=smoke")
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
    assert outcome(folder) == outcome(smoke_run[0]), f"seed {seed}"


def test_two_runs_at_once_are_refused_in_one_line(smoke_run):
    import fcntl

    folder, _ = smoke_run
    with (folder / ".snakemake" / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        refused = snakemake(folder, "--cores", "2", "--config", "study=smoke")
        assert refused.returncode == 2 and "error: another snakemake is running" in refused.stderr
        assert snakemake(folder, "-n", "--config", "study=smoke").returncode == 0  # looking is allowed


@pytest.mark.parametrize(
    ("given", "words"),
    [("study=smok", "did you mean 'smoke'"), ("studdy=smoke", "the only key is 'study'")],
)
def test_a_wrong_word_on_the_command_line_is_one_line(smoke_run, given, words):
    done = snakemake(smoke_run[0], "-n", "--config", given)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1 and words in errors[0] and "Traceback" not in done.stderr


def test_from_another_folder(smoke_run, tmp_path):
    done = snakemake(tmp_path, "-n", "-s", str(smoke_run[0] / "Snakefile"))
    assert done.returncode == 2 and "run from the root of the repository" in done.stderr
    there = snakemake(
        tmp_path, "-n", "-s", str(smoke_run[0] / "Snakefile"), "-d", str(smoke_run[0]), "--config", "study=smoke"
    )
    assert there.returncode == 0


@pytest.mark.parametrize("study", ["laptop", "smoke", "laptop-pretrain", "laptop-tune"])
def test_every_study_plans(smoke_run, study):
    done = snakemake(smoke_run[0], "-n", "--config", f"study={study}")
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_workflow_is_lint_clean(smoke_run):
    done = snakemake(smoke_run[0], "--lint", "--config", "study=smoke")
    assert done.returncode == 0, done.stdout + done.stderr


def test_jobs_say_one_line_and_exit_with_2(smoke_run):
    folder, _ = smoke_run
    command = [sys.executable, "-m", "harness.generation", "--study", "smoke", "--system", "d2"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "'d2f'" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_one_line(tmp_path):
    folder = copy_sources(tmp_path)
    folder.chmod(0o555)
    try:
        done = snakemake(folder, "--cores", "1", "--config", "study=smoke")
    finally:
        folder.chmod(0o755)
    assert done.returncode == 2 and "make the folder writable" in done.stderr
