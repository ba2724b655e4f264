"""Write a study's problems and its lm-eval task: ``python -m harness.tasks.prepare --study laptop``."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from backbone.cli import run
from harness.command import study_options
from harness.results import write_text
from harness.study import Task
from harness.tasks.problems import problems

# Exact match of the number behind the last "####"; {file} is relative to where lm-eval runs
LM_EVAL_TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}} |"
doc_to_target: "{{{{answer.split('####')[-1].strip()}}}}"
generation_kwargs:
  until: ["<eos>"]
  do_sample: false
filter_list:
  - name: final-number
    filter:
      - function: regex
        regex_pattern: "#### (-?[0-9]+)"
      - function: take_first
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


def prepare(task: Task, split: str, folder: Path) -> None:
    """Write ``<split>.jsonl`` for each split and ``task.yaml``, which scores ``split``."""
    for name, count in task.counts.items():
        difficulty = task.train_difficulty if name == "train" and task.train_difficulty else task.difficulty
        rows = itertools.islice(problems(name, task.seed, difficulty), count)
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_text(folder / "task.yaml", LM_EVAL_TASK.format(name=task.name, file=folder / f"{split}.jsonl"))


def main(argv: list[str]) -> None:
    options = study_options(__doc__, argv)
    prepare(options.loaded.task, options.loaded.split, options.results / "data")


if __name__ == "__main__":
    run(main)
