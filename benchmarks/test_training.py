"""Benchmark of training: seconds of one optimizer step of each kind, and tokens per second."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from backbone.diffusion import TeacherNoise
from backbone.examples import Examples
from backbone.pretraining import autoregressive_loss, teacher_loss
from backbone.training import step_generator
from d2f.distillation import DistillationSettings, student_loss
from harness.tasks.problems import Difficulty, problems
from harness.train import load_module, load_tokenizer

TEACHER = Path("models/laptop/teacher")


@pytest.mark.parametrize("kind", ["autoregressive", "teacher", "student"])
def test_training_step(benchmark, kind, tmp_path):
    torch.set_num_threads(2)
    rows = itertools.islice(problems("train", 1, Difficulty()), 500)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(TEACHER)
    examples, mask_id = Examples(tmp_path / "train.jsonl", tokenizer, 128), tokenizer.mask_token_id
    loss = {
        "autoregressive": lambda: autoregressive_loss(examples, 16),
        "teacher": lambda: teacher_loss(examples, 16, mask_id, TeacherNoise()),
        "student": lambda: student_loss(examples, 16, load_module(TEACHER).eval(), mask_id, DistillationSettings()),
    }[kind]()
    model, tokens = load_module(TEACHER), 0

    def step():
        nonlocal tokens
        value, count = loss(model, 0, step_generator(1, 0))
        value.backward()
        model.zero_grad()
        tokens = count

    benchmark.pedantic(step, rounds=10, warmup_rounds=2)
    benchmark.extra_info["tokens_per_second"] = tokens / benchmark.stats.stats.median if benchmark.stats else None
