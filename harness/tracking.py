"""MLflow as a published view of a study: the JSON files are the truth, this is the only writer.

Many jobs that write to one store race for its creation, and a run that is opened twice gets two values per
step. So jobs write JSON, and one publisher, run last, makes the store show exactly what the files say:

* a **plan** of runs is computed from the files alone: name, params, metrics, curve, artifacts;
* each planned run has a key (tag ``d2f.job_key``) and a digest of all it shows (``d2f.content_digest``). A
  finished run with the same digest stays; one with another is written anew, then the old one is deleted
  (softly: MLflow hides it, ``mlflow gc`` purges it);
* what is no longer in the plan is deleted. Runs without our tag belong to the user and are not touched.

So publishing twice changes nothing, and a lost store costs ten seconds. Without ``MLFLOW_TRACKING_URI`` it is
``mlflow.db`` and ``mlruns/`` in the current directory, where a bare ``mlflow ui`` finds it.

    python -m harness.tracking --results results/laptop --out results/laptop/mlflow_runs.csv
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from backbone.cli import Parser, one_line, run
from harness.provenance import file_digest
from harness.published import PlannedRun, plan
from harness.results import write_text

LOCAL_STORE = "mlflow.db"
KEY, DIGEST, PARENT = "d2f.job_key", "d2f.content_digest", "mlflow.parentRunId"
BATCH, PARAM_BATCH = 1000, 100  # MLflow's limits
LOCK_PATIENCE = 60.0  # seconds to wait for another publisher; one takes about ten
QUIET = {  # only where the user has not chosen otherwise
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # the default, 7 with growing pauses, takes minutes to give up
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
}
ABOUT = {
    "systems": "One run per system (no runs in sight? press *Model training*, top left). The chart view shows every "
    "number side by side; the table shows them after *Show more columns*. Sweep points are nested under their sweep: "
    "open it with +. Report, tables and figures are artifacts of the run `study {study}`.",
    "training": "One run per model that the study trained, with its loss curve (press *Model training*, top left).",
}
# MLflow opens in its GenAI mode, which shows no runs; this address opens the charts of an experiment
CHARTS = "http://127.0.0.1:5000/#/experiments/{}/runs?workflowType=machine_learning&compareRunsMode=CHART"


class TrackingError(OSError):
    """MLflow could not be written. No result is lost: they are in the JSON files."""


def masked(text: str) -> str:
    """Text without the user and password of an address."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def hush() -> None:
    """Silence what would bury our one line: migrations, retries, links to runs; and give up on a dead server soon."""
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)
    for name in ("alembic", "mlflow", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def only_publisher(uri: str) -> Iterator[None]:
    """Hold the lock beside a local store; two writers that create one at once break each other. Freed at exit."""
    path = uri.removeprefix("sqlite:///").split("?")[0]
    if not uri.startswith("sqlite:///") or not path:
        yield  # a server looks after itself
        return
    import fcntl

    with open(path + ".lock", "w") as file:
        until, told = time.monotonic() + LOCK_PATIENCE, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"another publisher still holds {path}.lock: let it end") from None
                if not told:
                    print(f"waiting for another publisher, which holds {path}.lock", file=sys.stderr)
                told = True
                time.sleep(0.2)
        yield


class Store:
    """The tracking store, seen as runs under keys.

    Args:
        uri: where.
        home: the directory whose ``mlruns/`` holds the artifacts, for the default store.
    """

    def __init__(self, uri: str, home: Path | None) -> None:
        from mlflow import MlflowClient

        self.client, self.home = MlflowClient(tracking_uri=uri), home

    def experiment(self, name: str, about: str, create: bool) -> str | None:
        """The id of an experiment; made when ``create``, brought back when the user deleted it."""
        held = self.client.get_experiment_by_name(name)
        if held is not None and held.lifecycle_stage != "active":
            self.client.restore_experiment(held.experiment_id)
        if held is not None and self.moved(held.artifact_location):
            # MLflow stores absolute paths: in a repository that was moved or copied, the artifacts of old runs
            # are out of reach and new ones would go to the old place. All of it can be published anew.
            self.client.rename_experiment(held.experiment_id, f"{name} (before the move, {held.experiment_id})")
            self.client.delete_experiment(held.experiment_id)
            held = None
        if held is None and create:
            return self.client.create_experiment(name, tags={"mlflow.note.content": about})
        return held.experiment_id if held else None

    def moved(self, location: str) -> bool:
        """Whether an experiment's artifacts lie outside the directory of the default store."""
        from urllib.parse import unquote, urlparse

        parts = urlparse(location)
        if self.home is None or parts.scheme not in ("", "file"):
            return False
        return not Path(unquote(parts.path)).resolve().is_relative_to(self.home.resolve())

    def runs(self, experiment: str) -> dict[str, list]:
        """Our active runs by key; more than one under a key when a publisher was killed."""
        found: dict[str, list] = {}
        token = None
        while True:
            page = self.client.search_runs([experiment], max_results=BATCH, page_token=token)
            for run_ in page:
                if KEY in run_.data.tags:
                    found.setdefault(run_.data.tags[KEY], []).append(run_)
            token = page.token
            if not token:
                return found

    def delete(self, runs: Iterable) -> None:
        for run_ in runs:
            self.client.delete_run(run_.info.run_id)

    def write(self, planned: PlannedRun, experiment: str, digest: str, parent_id: str | None) -> str:
        """Create the run. It becomes FINISHED last, so one that was cut off is never taken for whole."""
        begun = int(planned.started * 1000)
        tags = {**planned.tags, KEY: planned.key, DIGEST: digest, **({PARENT: parent_id} if parent_id else {})}
        created = self.client.create_run(experiment, start_time=begun, tags=tags, run_name=planned.name)
        run_id = created.info.run_id
        self.log_values(run_id, planned, begun)
        if planned.dataset:
            self.client.log_inputs(run_id, [dataset_input(planned.dataset)])
        for folder, path in planned.files:
            self.client.log_artifact(run_id, str(path), folder or None)
        self.client.set_terminated(run_id, "FINISHED", end_time=begun + int(planned.seconds * 1000))
        return run_id

    def log_values(self, run_id: str, planned: PlannedRun, begun: int) -> None:
        """Params and metrics in batches: ten times faster than one call a value."""
        from mlflow.entities import Metric, Param

        params = [Param(key, value) for key, value in planned.params.items()]
        metrics = [Metric(key, value, begun, 0) for key, value in planned.metrics.items()]
        for step, seconds, values in planned.curve:
            metrics += [Metric(key, value, begun + int(seconds * 1000), step) for key, value in values.items()]
        for start in range(0, len(params), PARAM_BATCH):
            self.client.log_batch(run_id, params=params[start : start + PARAM_BATCH])
        for start in range(0, len(metrics), BATCH):
            self.client.log_batch(run_id, metrics=metrics[start : start + BATCH])


def dataset_input(path: Path):
    """A data file as MLflow's dataset, known by its digest."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = json.dumps({"uri": str(path)})
    data = Dataset(name=path.name, digest=file_digest(path)[:16], source_type="local", source=source)
    return DatasetInput(data, [InputTag("mlflow.data.context", "evaluation")])


def publish_part(store: Store, experiment: str, planned: list[PlannedRun]) -> list[tuple[PlannedRun, str, bool]]:
    """Make one experiment show exactly the planned runs: (run, id, written anew)."""
    held = store.runs(experiment)
    ids: dict[str, str] = {}
    done = []
    for run_ in planned:
        parent = ids.get(run_.parent) if run_.parent else None
        digest, old = run_.digest(parent), held.pop(run_.key, [])
        same = [o for o in old if o.info.status == "FINISHED" and o.data.tags.get(DIGEST) == digest][:1]
        ids[run_.key] = same[0].info.run_id if same else store.write(run_, experiment, digest, parent)
        store.delete(o for o in old if o.info.run_id != ids[run_.key])  # after the new one is whole
        done.append((run_, ids[run_.key], not same))
    for gone in held.values():
        store.delete(gone)
    return done


def publish(results: Path, out: Path | None = None) -> list[tuple[str, str]]:
    """Make MLflow show the results of a study.

    Args:
        results: ``results/<study>``.
        out: a CSV of what is published where, to be written.

    Returns:
        ``(job key, run id)`` of every run.

    Raises:
        ValueError: a result file is not there or holds what cannot be published; MLflow was not touched.
        TrackingError: MLflow could not be written.
    """
    planned = plan(results)
    study = planned[0].tags["study"]
    home = None if os.environ.get("MLFLOW_TRACKING_URI") else Path.cwd()
    uri = f"sqlite:///{home / LOCAL_STORE}" if home else os.environ["MLFLOW_TRACKING_URI"]
    hush()
    from alembic.util import CommandError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    done, experiments = [], {}
    try:
        with only_publisher(uri):
            store = Store(uri, home)
            for part, about in ABOUT.items():
                ours = [run_ for run_ in planned if run_.part == part]
                held = store.experiment(f"d2f/{study}/{part}", about.format(study=study), create=bool(ours))
                if held is not None:
                    experiments[part] = held
                    done += publish_part(store, held, ours)
    except (MlflowException, SQLAlchemyError, CommandError, ImportError, OSError) as error:  # Import: of a driver
        again = "snakemake --cores all --forcerun publish" + ("" if study == "laptop" else f" --config study={study}")
        raise TrackingError(
            f"MLflow at {masked(uri)} could not be written ({masked(one_line(error))[:200]}); no result is lost, they "
            f"are the JSON files in {results}: mend it or set MLFLOW_TRACKING_URI, and publish again with `{again}`"
        ) from error
    if out is not None:
        write_runs(out, [(r.key, f"d2f/{study}/{r.part}", run_id, r.name) for r, run_id, _ in done])
    look = f"; `mlflow ui` shows them at {CHARTS.format(experiments['systems'])}" if home else ""
    new = sum(fresh for *_, fresh in done)
    print(f"MLflow: {len(done)} runs, {new} of them new, in {masked(uri)}{look}", file=sys.stderr)
    return [(run_.key, run_id) for run_, run_id, _ in done]


def write_runs(path: Path, rows: list[tuple[str, str, str, str]]) -> None:
    """The CSV that says which run holds which result."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("job_key", "experiment", "run_id", "run_name"), *rows])
    write_text(path, text.getvalue())


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True, metavar="FOLDER", help="results/<study>")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: <results>/mlflow_runs.csv")
    options = parser.parse_args(argv)
    publish(options.results, options.out or options.results / "mlflow_runs.csv")


if __name__ == "__main__":
    run(main)
