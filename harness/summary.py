"""``results/<study>/summary.json``: every number of the study, computed from its results and traces.

The schema is described in ``docs/summary.md``. ``python -m harness.summary --study laptop --results results/laptop``
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from backbone.cli import run
from backbone.trace import read_traces
from harness.accounting import Counts, attribution, count, rates
from harness.command import study_options
from harness.results import read_result, write_result
from harness.statistics import paired_accuracy, paired_ratio
from harness.study import Study

AR, VANILLA = "ar", "vanilla-paper"  # what the ratios are against


def rule_seconds(folder: Path) -> dict[str, float]:
    """Wall seconds per rule from Snakemake's benchmark files, and the total.

    The total is the union of the jobs' time spans, so two jobs side by side count once and the hours
    between an interruption and the second run do not count.
    """
    seconds: dict[str, float] = {}
    spans = []
    for path in sorted(folder.glob("*.tsv")):
        with path.open() as file:
            spent = float(next(csv.DictReader(file, delimiter="\t"))["s"])
        rule = path.stem.split("@")[0]
        seconds[rule] = seconds.get(rule, 0.0) + spent
        ended = path.stat().st_mtime
        spans.append((ended - spent, ended))
    total, until = 0.0, 0.0
    for begun, ended in sorted(spans):
        total += max(0.0, ended - max(begun, until))
        until = max(until, ended)
    return {"total": round(total, 1), **{rule: round(spent, 1) for rule, spent in sorted(seconds.items())}}


class RaceTimes:
    """Tokens and seconds of every system on every prompt of the race, and the counts added up."""

    def __init__(self, path: Path, end_ids: dict[str, list[int]]) -> None:
        _, records = read_traces(path)
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.totals: dict[str, Counts] = {}
        self.decodes: dict[str, int] = {}
        self.forward_seconds: dict[str, float] = {}
        sums: dict[tuple[str, int], np.ndarray] = {}
        for record in records:
            name, key, trace = record["system"], (record["system"], record["id"]), record["trace"]
            if name not in end_ids:
                continue
            self.tokens[key] = trace.tokens
            counts = count(trace, record["useful"], end_ids[name])
            self.totals[name] = self.totals.get(name, Counts()) + counts
            self.decodes[name] = self.decodes.get(name, 0) + 1
            self.forward_seconds[name] = self.forward_seconds.get(name, 0.0) + record["forward_seconds"]
            sums[key] = sums.get(key, np.zeros(2)) + (counts.useful, counts.seconds)
        prompts = sorted({number for _, number in sums})
        names = list(self.totals)
        for name in names:
            absent = [number for number in prompts if (name, number) not in sums]
            if absent:
                raise ValueError(f"{path}: system {name} did not run prompt {absent[0]}: delete the file and run again")
        self.rows = {name: np.stack([sums[name, number] for number in prompts]) for name in names}


def outside_forward(times: RaceTimes, name: str) -> float | None:
    """Share of a decode's time spent outside the network's forward; None where it was not measured (GPU)."""
    within = times.forward_seconds[name]
    return 1 - within / times.totals[name].seconds if within else None


def check_same_tokens(times: RaceTimes, name: str, records: list[dict]) -> None:
    """The race must have decoded what was scored."""
    for record in records:
        raced = times.tokens.get((name, record["id"]))
        if raced is not None and raced != record["trace"].tokens:
            raise ValueError(
                f"system {name}, problem {record['id']}: the race decoded other tokens than generate scored: "
                "delete race.traces.jsonl and generate/, and run again"
            )


def system_row(name: str, result: dict, times: RaceTimes, answers: dict[str, dict], study: Study) -> dict:
    """One entry of ``systems``."""
    numbers = study.statistics
    total = Counts(**result["counts"])
    measured = rates(total, result["problems"])
    speed = rates(times.totals[name], times.decodes[name])
    ratio = {
        other: paired_ratio(
            times.rows[name], times.rows[other], resamples=numbers.resamples, confidence=numbers.confidence
        )
        for other in (AR, VANILLA)
        if other in times.rows
    }
    keys = ("decoder", "model", "forward", "settings", "sweep", "problems", "accuracy", "accuracy_interval")
    return {
        **{key: result[key] for key in keys},
        "useful_tokens_per_second": speed["useful_tokens_per_second"],
        "latency_seconds": speed["latency_seconds"],
        **{key: measured[key] for key in ("tokens_per_forward", "token_efficiency", "forwards", "length")},
        "outside_forward": outside_forward(times, name),
        "peak_memory_bytes": result["peak_memory_bytes"],
        "ratio_to_ar": ratio.get(AR),
        "ratio_to_vanilla": ratio.get(VANILLA),
        "versus_ar": paired_accuracy(answers[name], answers[AR], numbers.confidence) if AR in answers else None,
        "attribution_to_ar": attribution(times.totals[name], times.totals[AR]) if AR in times.totals else None,
    }


def summarise(study_name: str, study: Study, results: Path) -> dict:
    """Everything that goes into ``summary.json``."""
    found, answers, traces = {}, {}, {}
    for name in study.systems:
        found[name] = read_result(results / "generate" / f"{name}.json", "d2f-suite/result")
        _, traces[name] = read_traces(results / "generate" / f"{name}.traces.jsonl")
        answers[name] = {record["id"]: record["correct"] for record in traces[name]}
    stamps = {result["study_digest"] for result in found.values()}
    machines = {str(sorted(result["machine"].items())) for result in found.values()}
    if len(machines) > 1:
        raise ValueError(
            f"{results}/generate holds results of {len(machines)} machines or precisions: run it anew on one"
        )
    times = RaceTimes(results / "race.traces.jsonl", {name: result["end_ids"] for name, result in found.items()})
    for name in study.systems:
        check_same_tokens(times, name, traces[name])
    first = next(iter(found.values()))
    models = {}
    for name, model in ((name, model) for name, model in study.models.items() if model.measured_by):
        measured = found[model.measured_by]
        models[name] = {
            "accuracy": measured["accuracy"],
            "problems": measured["problems"],
            "measured_by": model.measured_by,
            "parameters": measured["parameters"],
        }
    return {
        "study": study_name,
        "study_digest": sorted(stamps)[0] if len(stamps) == 1 else sorted(stamps),
        "commit": first["commit"],
        "task": study.task.name,
        "split": study.split,
        "max_new_tokens": study.task.max_new_tokens,
        "machine": first["machine"],
        "seconds": rule_seconds(results / "benchmarks"),
        "models": models,
        "statistics": {"confidence": study.statistics.confidence, "margin": study.statistics.margin},
        "systems": {name: system_row(name, result, times, answers, study) for name, result in found.items()},
    }


def main(argv: list[str]) -> None:
    options = study_options(__doc__, argv)
    values = summarise(options.study, options.loaded, options.results)
    write_result(options.results / "summary.json", "d2f-suite/summary", values)


if __name__ == "__main__":
    run(main)
