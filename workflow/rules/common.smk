# Helpers of the rules; the only place with Python in it.
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(workflow.basedir)
sys.path.insert(0, str(ROOT))
# `python` in the rules is the interpreter that runs Snakemake, whether or not its environment is activated
os.environ["PATH"] = os.pathsep.join(
    [str(Path(sys.executable).parent), os.environ["PATH"]]
)

from harness.study import load_study

WHOLE_MACHINE = 10_000  # threads of a job that must run alone; clipped to --cores


def stop(message):
    """One line and exit code 2, instead of a traceback, for what the user can mend."""
    print(f"error: {message}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(2)


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


def take_turn():
    """Hold a lock for the life of this process, so that two runs never share a folder.

    Unlike Snakemake's own lock it goes away with a killed process; whoever holds it may clear a stale one of
    Snakemake's. Jobs watch D2F_SUPERVISOR and end within a second after it has died.
    """
    folder = Path(".snakemake")
    try:
        folder.mkdir(exist_ok=True)
        turn = (folder / "turn").open("w")
        fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stop(
            "another snakemake is running in this folder: wait until it is done, or stop it"
        )
    except OSError as error:
        stop(
            f"cannot write here ({error}): make the folder writable, or copy the repository"
        )
    os.environ["D2F_SUPERVISOR"] = str(os.getpid())
    if any(folder.glob("locks/*")):
        shutil.rmtree(folder / "locks")
        time.sleep(2)  # jobs of the killed run are ending
    return turn


TURN = None if workflow.dryrun else take_turn()
STUDY_NAME = str(config.get("study", "laptop"))
STUDY = get_study()
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
