"""The store shows exactly what the JSON files say: once, after a change, after a move, and when it fails.

Creating a store takes seconds, so the tests share one; each has a study, and so experiments, of its own.
"""

from __future__ import annotations

import csv
import fcntl
import json
import math
import shutil
from pathlib import Path

import pytest

from harness import tracking
from harness.published import clean, flat, numbers, plan
from harness.tracking import KEY, publish

MACHINE = {"cpu": "Some CPU", "cores": 2, "device": "cpu", "torch": "2.13.0"}


def row(decoder: str, speed: float, sweep: str | None = None, **settings) -> dict:
    """A system of the summary."""
    return {
        "decoder": decoder, "model": "ar" if decoder == "autoregressive" else "student", "forward": "lean",
        "settings": settings, "sweep": sweep, "problems": 500,
        "accuracy": 0.97, "accuracy_interval": [0.95, 0.98],
        "useful_tokens_per_second": speed, "latency_seconds": 0.04, "tokens_per_forward": 1.0,
        "token_efficiency": 0.6, "forwards": 86.0, "length": 86.0, "peak_memory_bytes": 2**28,
        "ratio_to_ar": [speed / 2000, 0.9, 1.1], "ratio_to_vanilla": None,
        "versus_ar": {"problems": 500, "difference": 0.0, "interval": [-0.01, 0.01], "p_value": 1.0},
        "attribution_to_ar": {"useful_share": 1.0, "tokens_per_forward": 1.0, "forwards_per_second": 1.0},
    }  # fmt: skip


def make(study: str) -> Path:
    """A small results folder in the current directory: three systems, two sweep points, one trained model."""
    results = Path("results") / study
    common = {"version": 1, "study": study, "study_digest": "abc", "commit": "0123456789+", "machine": MACHINE}
    summary = {
        **common, "schema": "d2f-suite/summary", "task": "word-problems", "split": "test", "max_new_tokens": 128,
        "seconds": {"total": 512.3}, "statistics": {"confidence": 0.95, "margin": 0.02},
        "models": {"ar": {"accuracy": 0.97, "parameters": 871000}, "student": {"accuracy": None, "parameters": None}},
        "systems": {
            "ar": row("autoregressive", 2000.0),
            "vanilla": row("llada", 300.0, block_length=32),
            "d2f": row("d2f", 4000.0, block_size=16, tau_conf=0.9),
            "d2f-block_size~8": row("d2f", 3000.0, "block-size", block_size=8),
            "d2f-block_size~32": row("d2f", 3500.0, "block-size", block_size=32),
        },
    }  # fmt: skip
    training = {"loss": 0.5, "seconds": 9.0, "tokens_per_second": 100.0, "settings": {"training": {"steps": 40}}}
    training |= {**common, "schema": "d2f-suite/training", "sha256": "ff"}
    lines = [{"step": 20, "loss": 1.5, "gradient_norm": math.inf}, {"step": 40, "loss": 0.5, "gradient_norm": 2.0}]
    files = {
        "summary.json": json.dumps(summary),
        "models/student/training.json": json.dumps(training),
        "models/student/metrics.jsonl": "".join(json.dumps({**line, "seconds": 1.0}) + "\n" for line in lines),
        "generate/ar.json": "{}",
        "tables/systems.csv": "system,accuracy\nar,0.97\n",
        "report.html": "<h1>Report</h1>",
        "data/test.jsonl": '{"question": "?"}\n',
    }
    for name, text in files.items():
        (results / name).parent.mkdir(parents=True, exist_ok=True)
        (results / name).write_text(text)
    return results


def change(results: Path, edit) -> None:
    """Edit ``summary.json`` in place."""
    values = json.loads((results / "summary.json").read_text())
    edit(values)
    (results / "summary.json").write_text(json.dumps(values))


def shown(study: str, part: str = "systems", uri: str | None = None) -> dict[str, list]:
    """Active runs of an experiment by name."""
    from mlflow import MlflowClient

    client = MlflowClient(uri or f"sqlite:///{Path.cwd()}/mlflow.db")
    experiment = client.get_experiment_by_name(f"d2f/{study}/{part}")
    found: dict[str, list] = {}
    for run in client.search_runs([experiment.experiment_id]):
        found.setdefault(run.info.run_name, []).append(run)
    return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("repository")


@pytest.fixture
def here(shared, monkeypatch) -> Path:
    """The shared store's directory as the current one."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for key in tracking.QUIET:  # so that what `publish` sets is taken back
        monkeypatch.setenv(key, tracking.QUIET[key])
    monkeypatch.chdir(shared)
    return shared


@pytest.fixture
def published(here, capfd) -> tuple[Path, list, str]:
    """The study ``once``, published through the command line: the CSV, its pairs, and what was printed."""
    results = make("once")
    tracking.main(["--results", str(results)])
    printed = capfd.readouterr()
    assert printed.out == ""
    out = results / "mlflow_runs.csv"
    return out, publish(results), printed.err


def test_publish_once_shows_every_number(here, published):
    out, pairs, printed = published
    assert printed.count("\n") == 1 and "mlflow ui" in printed  # migrations and links of MLflow are silenced
    found = shown("once")
    names = ["ar", "vanilla", "d2f", "d2f-block_size~8", "d2f-block_size~32", "study once", "sweep block-size"]
    assert {name: len(runs) for name, runs in found.items()} == dict.fromkeys(names, 1)
    d2f = found["d2f"][0]
    assert d2f.data.params["tau_conf"] == "0.9" and d2f.data.params["decoder"] == "d2f"
    assert d2f.data.metrics["accuracy_low"] == 0.95 and d2f.data.metrics["ratio_to_ar"] == 2.0
    assert d2f.data.metrics["ratio_to_ar_high"] == 1.1 and d2f.data.metrics["peak_memory_mib"] == 256
    assert d2f.data.metrics["attribution/useful_share"] == 1 and d2f.data.metrics["versus_ar_low"] == -0.01
    assert d2f.data.tags["commit"] == "0123456789+" and d2f.data.tags["study_digest"] == "abc"
    assert d2f.inputs.dataset_inputs[0].dataset.name == "test.jsonl"
    point, sweep = found["d2f-block_size~8"][0], found["sweep block-size"][0]
    assert point.data.tags["mlflow.parentRunId"] == sweep.info.run_id
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [(line["job_key"], line["run_id"]) for line in rows] == pairs and len(rows) == 8
    assert {line["experiment"] for line in rows} == {"d2f/once/systems", "d2f/once/training"}


def test_null_is_not_logged(here):
    results = make("null")
    change(results, lambda s: s["systems"]["d2f"].update(accuracy=None, accuracy_interval=None, peak_memory_bytes=None))
    (d2f,) = [run for run in plan(results) if run.name == "d2f"]
    assert not {"accuracy", "accuracy_low", "peak_memory_mib", "ratio_to_vanilla"} & d2f.metrics.keys()
    assert 0 not in {value for key, value in d2f.metrics.items() if not key.startswith("versus_ar")}


def test_training_has_its_curve_and_the_study_its_artifacts(here, published):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{here}/mlflow.db")
    (student,) = shown("once", "training")["student"]
    history = client.get_metric_history(student.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(20, 1.5), (40, 0.5)]
    norms = client.get_metric_history(student.info.run_id, "gradient_norm")
    assert [(m.step, m.value) for m in norms] == [(40, 2.0)]  # the infinite one is left out
    assert student.data.params["training.steps"] == "40"
    (study,) = shown("once")["study once"]
    assert {f.path for f in client.list_artifacts(study.info.run_id)} == {"report.html", "summary.json", "tables"}
    assert (here / "mlruns").is_dir()


def test_publish_again_changes_only_what_changed(here):
    results = make("again")
    first = dict(publish(results))
    assert dict(publish(results)) == first and all(len(runs) == 1 for runs in shown("again").values())
    change(results, lambda s: s["systems"]["ar"].update(accuracy=0.5))
    second = dict(publish(results))
    changed = {key for key in first if first[key] != second[key]}
    assert changed == {"again/systems/ar", "again/study"}  # the study's run carries the summary
    (ar,) = shown("again")["ar"]
    assert ar.data.metrics["accuracy"] == 0.5


def test_what_vanished_is_deleted_and_other_runs_are_not_touched(here):
    from mlflow import MlflowClient

    results = make("gone")
    publish(results)
    client = MlflowClient(f"sqlite:///{here}/mlflow.db")
    experiment = client.get_experiment_by_name("d2f/gone/systems").experiment_id
    client.create_run(experiment, run_name="mine")
    cut_off = {KEY: "gone/systems/ar", tracking.DIGEST: "abc"}
    client.create_run(experiment, run_name="ar", tags=cut_off)  # a publisher that was killed left this
    for name in ("vanilla", "d2f-block_size~8", "d2f-block_size~32"):
        change(results, lambda s, name=name: s["systems"].pop(name))
    change(results, lambda s: s["models"].pop("student"))
    publish(results)
    assert {name: len(runs) for name, runs in shown("gone").items()} == {"ar": 1, "d2f": 1, "study gone": 1, "mine": 1}
    assert shown("gone", "training") == {}


@pytest.mark.parametrize("value", [math.nan, math.inf, "fast", True])
def test_a_number_that_is_none_stops_before_the_store(here, value):
    results = make("nan")
    change(results, lambda s: s["systems"]["ar"].update(latency_seconds=value))
    with pytest.raises(ValueError, match=r"systems\.ar\.latency_seconds is .*finite number or null") as caught:
        publish(results)
    assert "\n" not in str(caught.value)


def test_names_that_mlflow_refuses_are_mapped():
    assert clean("exact_match,strict-match") == "exact_match/strict-match"
    assert clean("tau@0.9~x=1") == "tau_0.9_x_1"
    assert dict(numbers("exact_match,strict", [1, 0, 2], "here")) == {
        "exact_match/strict": 1,
        "exact_match/strict_low": 0,
        "exact_match/strict_high": 2,
    }
    assert flat({"a": {"b": [1]}, "c": None, "d": "x" * 7000})["d"].endswith("…")
    assert flat({"a": {"b": [1]}, "c": None, "d": False}) == {"a.b": "[1]", "d": "false"}


def test_summary_that_is_not_there():
    with pytest.raises(ValueError, match="snakemake"):
        publish(Path("results/nowhere"))


@pytest.mark.parametrize("uri", ["http://user:secret@127.0.0.1:9", "sqlite:////nowhere/x.db", "nonsense://x"])
def test_failure_is_one_line_and_loses_nothing(here, monkeypatch, uri):
    results = make("failure")
    before = {path: path.read_bytes() for path in results.rglob("*") if path.is_file()}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(OSError, match=r"no result is lost.*--forcerun publish --config study=failure") as caught:
        publish(results, results / "mlflow_runs.csv")
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)
    assert {path: path.read_bytes() for path in results.rglob("*") if path.is_file()} == before


def test_two_publishers(here, monkeypatch):
    monkeypatch.setattr(tracking, "LOCK_PATIENCE", 0.3)
    with open(here / "mlflow.db.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another publisher"):
            publish(make("lock"))


def test_moved_repository_is_published_anew(here, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    results = make("moved")
    old = dict(publish(results))
    moved = tmp_path / "elsewhere"
    shutil.copytree(here, moved)
    monkeypatch.chdir(moved)
    new = dict(publish(results))
    assert new.keys() == old.keys() and not set(new.values()) & set(old.values())
    assert all(len(runs) == 1 for runs in shown("moved").values())
    client = MlflowClient(f"sqlite:///{moved}/mlflow.db")
    assert str(moved) in client.get_run(new["moved/study"]).info.artifact_uri
    assert dict(publish(results)) == new


def test_tracking_uri_of_the_user(here, tmp_path, monkeypatch):
    uri = f"sqlite:///{tmp_path}/team.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    publish(make("team"))
    assert len(shown("team", uri=uri)) == 7
    assert (tmp_path / "team.db.lock").exists()
