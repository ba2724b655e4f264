# Helpers of the rules; the only place with Python in it.
import dataclasses
import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(workflow.basedir)
sys.path.insert(0, str(ROOT))

from harness.study import load_study
from harness.turn import own_interpreter, take_turn

WHOLE_MACHINE = 10_000  # threads of a job that must run alone; clipped to --cores


def stop(message):
    """One line and exit code 2, instead of a traceback, for what the user can mend."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def get_study():
    """The study named by `--config study=...`."""
    unknown = set(config) - {"study"}
    if unknown:
        stop(
            f"unknown --config key {sorted(unknown)[0]!r}: the only key is 'study'; "
            "everything else is set in config/studies/<study>.yaml"
        )
    try:
        return load_study(str(config.get("study", "laptop")))
    except ValueError as error:
        stop(error)


own_interpreter()
STUDY_NAME = str(config.get("study", "laptop"))
STUDY = get_study()
try:
    TURN = take_turn(sys.argv[1:])  # kept: closing it gives the turn away
except (ValueError, OSError) as error:
    stop(error)
RESULTS = f"results/{STUDY_NAME}"
FETCHED = [name for name, model in STUDY.models.items() if model.kind == "fetch"]
TRAINED = [name for name in STUDY.models if name not in FETCHED]
FIGURES = ["throughput", "tradeoff", "block-size", "trace"]
TABLES = ["systems", "attribution", "sweeps"]


wildcard_constraints:
    model="[a-z0-9-]+",
    system="[a-z0-9._~-]+",


def get_key(*parts):
    """A digest of the parts of the study that a job depends on: what makes it run again when they change."""
    plain = [dataclasses.asdict(p) if dataclasses.is_dataclass(p) else p for p in parts]
    text = json.dumps(plain, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def get_decoding():
    """Settings that every decode of the study depends on."""
    return [STUDY.device, STUDY.dtype, STUDY.threads, STUDY.task]


def get_sources(*patterns):
    """Source files as inputs, so that a rule runs again when its code changes."""
    return sorted(
        str(path.relative_to(ROOT))
        for pattern in patterns
        for path in ROOT.glob(pattern)
        if path.is_file()
    )


def get_start(wildcards):
    """The weights that a training starts from, if any."""
    start = STUDY.models[wildcards.model].start
    return [f"{RESULTS}/models/{start}/model.safetensors"] if start else []


def get_weights(wildcards):
    """The weights that a system decodes with."""
    return f"{RESULTS}/models/{STUDY.systems[wildcards.system].model}/model.safetensors"


def get_drawn_traces():
    """The traces that the figure `trace` draws from; a study without D2F has none."""
    return [f"{RESULTS}/generate/d2f.traces.jsonl"] if "d2f" in STUDY.systems else []


def get_final_output():
    """Everything a study ends with."""
    return [
        *(
            f"{RESULTS}/models/{name}/README.md"
            for name in TRAINED
            if STUDY.models[name].measured_by
        ),
        f"{RESULTS}/report.html",
        f"{RESULTS}/mlflow_runs.csv",
    ]
