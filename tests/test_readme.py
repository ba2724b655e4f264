"""The README's commands work: each is known here, and run or planned."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.checkout import ROOT, free_port

README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    """Every line of the README's bash blocks, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    lines = [re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def test_every_command_is_one_that_is_tested_here():
    known = ("make", "mlflow ui", "python -m d2f.generate ")
    assert commands()
    for command in commands():
        assert command.startswith(known), f"README has a command that no test runs: {command}"


def test_every_make_target_exists():
    for command in commands():
        if command.startswith("make"):
            planned = subprocess.run(
                [*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True, check=False
            )
            assert planned.returncode == 0, planned.stderr


def test_the_generate_command_decodes(smoke_run):
    folder, _ = smoke_run
    command = next(c for c in commands() if "d2f.generate" in c)
    arguments = [sys.executable, *shlex.split(command)[1:], "--model", "results/smoke/models/student", "--delay", "0"]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tokens per forward" in done.stdout.splitlines()[-1]


def test_bare_mlflow_ui_shows_the_study(smoke_run):
    folder, _ = smoke_run
    port = free_port()
    server = subprocess.Popen(
        [str(Path(sys.executable).parent / "mlflow"), "ui", "--port", str(port), "--workers", "1"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"},
    )
    try:
        url = f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/search?max_results=20"
        for _ in range(120):
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    text = answer.read().decode()
                break
            except OSError:
                time.sleep(0.5)
        assert "d2f/smoke/systems" in text and "d2f/smoke/training" in text
    finally:
        os.killpg(server.pid, signal.SIGKILL)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
