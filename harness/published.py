"""What MLflow shall show of a study: a plan of runs, computed from the result files alone, without MLflow.

Each planned run has a key, everything that its page will show, and a digest of that. The publisher
(:mod:`harness.tracking`) makes a store show exactly the plan.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.provenance import file_digest
from harness.results import read_result

PARAM_LENGTH = 6000  # MLflow's limit
ROW_PARAMS = ("decoder", "model", "forward", "sweep", "problems")  # of a system's row; its other numbers are metrics


@dataclass
class PlannedRun:
    """Everything one run will show.

    Args:
        key: what it is published under, unique in the store.
        part: ``systems`` or ``training``, the end of the experiment's name.
        started: Unix seconds; the runs table is ordered by it.
        seconds: how long the work took, shown as the run's duration.
        curve: ``(step, seconds, {metric: value})`` lines.
        files: ``(folder among the artifacts, file)``.
        parent: key of the run that this one is nested under.
        dataset: what was decoded, if it is there.
    """

    key: str
    part: str
    name: str
    started: float
    seconds: float = 0.0
    params: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    curve: list[tuple[int, float, dict[str, float]]] = field(default_factory=list)
    files: list[tuple[str, Path]] = field(default_factory=list)
    parent: str | None = None
    dataset: Path | None = None

    def digest(self, parent_id: str | None) -> str:
        """Digest of all that the run shows, without the time; a new parent makes a new run."""
        held = [(folder, path.name, file_digest(path)) for folder, path in self.files]
        data = file_digest(self.dataset) if self.dataset else None
        shown = [self.name, self.params, self.metrics, self.tags, self.curve, held, data, parent_id]
        return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def clean(name: str) -> str:
    """A name that MLflow takes (letters, digits, ``_ - . space : /``): comma to slash, anything else to ``_``."""
    return re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name.replace(",", "/"))


def numbers(name: str, value: object, where: str) -> Iterator[tuple[str, float]]:
    """Metrics of a value of the summary: a number, an interval, an estimate with its interval, or a dict of those.

    ``null`` means not measured and gives nothing, never 0.
    """
    if value is None:
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(f"{name}/{key}", inner, f"{where}.{key}")
    elif isinstance(value, list) and len(value) in (2, 3):
        ends = ("_low", "_high") if len(value) == 2 else ("", "_low", "_high")
        for end, inner in zip(ends, value, strict=True):
            yield from numbers(name.removesuffix("_interval") + end, inner, where)
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield clean(name), float(value)
    else:
        raise ValueError(f"{where} is {value!r}, but must be a finite number or null: delete the file and run again")


def flat(values: dict, prefix: str = "") -> dict[str, str]:
    """Settings as flat params: ``{"training": {"steps": 9}}`` -> ``{"training.steps": "9"}``."""
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif value is not None and value != "":
            text = value if isinstance(value, str) else json.dumps(value)
            found[clean(f"{prefix}{key}")] = text if len(text) <= PARAM_LENGTH else text[: PARAM_LENGTH - 2] + " …"
    return found


def common_tags(values: dict) -> dict[str, str]:
    """Where a number comes from, on every run; the commit also where MLflow looks for it."""
    stamp = values["study_digest"]
    return {
        "study": values["study"],
        "study_digest": stamp if isinstance(stamp, str) else ", ".join(stamp),
        "commit": values["commit"],
        "mlflow.source.git.commit": values["commit"].rstrip("+"),
        "mlflow.source.name": "harness/tracking.py",
        "mlflow.source.type": "LOCAL",
        **flat(values["machine"], "machine."),
    }


def study_run(results: Path, summary: dict, started: float) -> PlannedRun:
    """The run that carries what people look at: report, tables, figures, the summary itself.

    It has no metrics, which would be charted beside those of the systems.
    """
    study = summary["study"]
    shown = [("", path) for path in (results / "report.html", results / "summary.json") if path.exists()]
    for folder in ("tables", "figures"):
        shown += [(folder, path) for path in sorted((results / folder).glob("*.*")) if path.suffix != ".tmp"]
    return PlannedRun(
        f"{study}/study",
        "systems",
        f"study {study}",
        started,
        seconds=summary["seconds"].get("total") or 0.0,
        params=flat({key: summary[key] for key in ("task", "split", "max_new_tokens", "statistics")}),
        files=shown,
    )


def system_run(results: Path, summary: dict, name: str, started: float) -> PlannedRun:
    """One system or sweep point: its settings as params, every measured number as a metric."""
    row, source = dict(summary["systems"][name]), results / "summary.json"
    size = summary["models"].get(row.get("model"), {}).get("parameters")
    fixed = flat({**{key: row.pop(key, None) for key in ROW_PARAMS}, "model_parameters": size})
    settings = flat(row.pop("settings", None) or {})
    row["attribution"] = row.pop("attribution_to_ar", None)  # a slash groups charts; the headline numbers have none
    row |= {f"versus_ar_{key}": value for key, value in (row.pop("versus_ar", None) or {}).items()}
    where = f"{source}: systems.{name}"
    metrics = {k: v for key, value in row.items() for k, v in numbers(key, value, f"{where}.{key}")}
    if "peak_memory_bytes" in metrics:
        metrics["peak_memory_mib"] = metrics.pop("peak_memory_bytes") / 2**20
    result = results / "generate" / f"{name}.json"  # its samples' traces stay where they are: they are large
    return PlannedRun(
        f"{summary['study']}/systems/{name}",
        "systems",
        name,
        started,
        seconds=metrics.get("latency_seconds", 0.0) * float(fixed.get("problems", 0)),
        params={**{key if key not in fixed else f"settings.{key}": v for key, v in settings.items()}, **fixed},
        metrics=metrics,
        files=[("", result)] if result.exists() else [],
        parent=f"{summary['study']}/sweeps/{fixed['sweep']}" if "sweep" in fixed else None,
    )


def read_curve(path: Path) -> list[tuple[int, float, dict[str, float]]]:
    """The lines of ``metrics.jsonl``; a number that is not finite (a spike's gradient norm) is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        read = [json.loads(line) for line in lines]
        return [
            (values["step"], values.get("seconds", 0.0), {
                clean(key): float(value)
                for key, value in values.items()
                if key != "step" and value is not None and math.isfinite(value)
            })
            for values in read
        ]  # fmt: skip
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{path} is cut off or lacks 'step': delete its folder and run again") from None


def training_run(summary: dict, path: Path) -> PlannedRun:
    """One trained model: its settings as params, and its loss curve."""
    values = read_result(path, "d2f-suite/training")
    curve = read_curve(path.with_name("metrics.jsonl"))
    last = [] if curve else numbers("loss", values["loss"], f"{path}: loss")  # otherwise the curve ends with it
    return PlannedRun(
        f"{summary['study']}/training/{path.parent.name}",
        "training",
        path.parent.name,
        path.stat().st_mtime - values["seconds"],
        seconds=values["seconds"],
        params=flat({**values["settings"], "weights_sha256": values.get("sha256")}),
        metrics=dict(last),
        tags=common_tags({**summary, **values}),
        curve=curve,
        files=[("", path)],
    )


def plan(results: Path) -> list[PlannedRun]:
    """Every run that the store shall show of a study, parents before their children."""
    source = results / "summary.json"
    if not source.exists():
        raise ValueError(f"{source} is not there: run `snakemake --cores all {results / 'report.html'}` first")
    summary = read_result(source, "d2f-suite/summary")
    study, newest = summary["study"], source.stat().st_mtime
    # the newest run is shown at the top: a second between them keeps the order of the study file
    found = [study_run(results, summary, newest)]
    main = [name for name, row in summary["systems"].items() if not row.get("sweep")]
    swept = [name for name in summary["systems"] if name not in main]
    found += [system_run(results, summary, name, newest - 1 - place) for place, name in enumerate(main)]
    later = newest - 1 - len(main)
    for sweep in dict.fromkeys(summary["systems"][name]["sweep"] for name in swept):
        found.append(PlannedRun(f"{study}/sweeps/{sweep}", "systems", f"sweep {sweep}", later, params={"sweep": sweep}))
        later -= 1
    found += [system_run(results, summary, name, later - place) for place, name in enumerate(swept)]
    data = results / "data" / f"{summary['split']}.jsonl"
    for planned in found:
        planned.tags = common_tags(summary)
        planned.dataset = data if data.exists() and planned.metrics else None
    trained = [results / "models" / name / "training.json" for name in summary["models"]]
    return found + [training_run(summary, path) for path in trained if path.exists()]
