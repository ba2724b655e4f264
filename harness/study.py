"""A study: what one run is, read from ``config/studies/<name>.yaml`` and checked before anything starts.

A study file is self-contained. ``load_study`` refuses unknown keys, wrong types, values out of range and
references to models that are not there, each in one line. The study's digest is over its parsed content,
so a comment does not change it and any number does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from backbone.diffusion import TeacherNoise
from backbone.pretraining import Shape
from backbone.settings import build, nearest
from backbone.training import Recipe
from d2f.distillation import DistillationSettings
from harness.systems import check_system
from harness.tasks.problems import SPLITS, Difficulty

STUDIES = Path("config/studies")
KINDS = ("fetch", "autoregressive", "teacher", "student")


@dataclass(frozen=True)
class Task:
    """The problems: how hard, how many of each split, and how long an answer may be.

    ``answer_length`` is the fixed length of answers in training, ``max_new_tokens`` in decoding. Training
    problems may be harder than those decoded (``train_difficulty``).
    """

    name: str
    difficulty: Difficulty
    counts: dict[str, int]
    answer_length: int
    max_new_tokens: int
    seed: int = 1
    train_difficulty: Difficulty | None = None

    def __post_init__(self) -> None:
        for split, number in self.counts.items():
            if split not in SPLITS:
                raise ValueError(f"counts: unknown split {split!r}; {nearest(split, SPLITS)}")
            if number < 1:
                raise ValueError(f"counts.{split} is {number}: give a whole number of at least 1")
        if self.max_new_tokens < 1 or self.answer_length < 1:
            raise ValueError("answer_length and max_new_tokens must be at least 1")


@dataclass(frozen=True)
class Model:
    """Where a model comes from.

    Args:
        kind: ``fetch`` (``source`` and its ``sha256``), ``autoregressive`` (from scratch, or from model
            ``start``), ``teacher`` (from the weights of model ``start``) or ``student`` (distilled from model ``start``).
        source: folder to fetch from.
        sha256: of the fetched ``model.safetensors``.
        start: the model it starts from.
        shape: of a model from scratch.
        noise: of a teacher.
        distillation: of a student.
        training: how to optimise.
        measured_by: the system whose accuracy counts as the model's; empty for a step on the way to another.
    """

    kind: str
    measured_by: str = ""
    source: str = ""
    sha256: str = ""
    start: str = ""
    shape: Shape = Shape()
    noise: TeacherNoise = TeacherNoise()
    distillation: DistillationSettings = DistillationSettings()
    training: Recipe | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; {nearest(self.kind, KINDS)}")
        if self.kind == "fetch" and not (self.source and len(self.sha256) == 64):
            raise ValueError("a fetched model needs source and sha256 (64 hex digits)")
        if self.kind != "fetch" and self.training is None:
            raise ValueError("a trained model needs the key 'training'")
        if self.kind == "student" and not self.measured_by:
            raise ValueError("a student needs the key 'measured_by' (its system, whose settings it is shipped with)")
        if self.kind in ("teacher", "student") and not self.start:
            raise ValueError(f"a {self.kind} needs the key 'start' (the model it starts from)")


@dataclass(frozen=True)
class System:
    """One row of the tables.

    Args:
        decoder: name in :mod:`harness.systems`.
        model: name of a model of the study.
        settings: of the decoder.
        forward: ``lean``, or ``module`` (transformers' own forward).
        problems: how many problems of the split it answers; 0 = all.
        sweep: the sweep it is a point of; empty for a main system.
    """

    decoder: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    forward: str = "lean"
    problems: int = 0
    sweep: str = ""

    def __post_init__(self) -> None:
        check_system(self.decoder, self.settings, self.forward)
        if self.problems < 0:
            raise ValueError(f"problems is {self.problems}: give a whole number of at least 0 (0 = all)")


@dataclass(frozen=True)
class Sweep:
    """Variants of a system: every combination of the values of ``vary``."""

    of: str
    vary: dict[str, tuple[Any, ...]]
    problems: int = 0


@dataclass(frozen=True)
class Race:
    """Systems timed side by side: the first ``prompts`` of the split, ``rounds`` times, after ``warmup`` prompts."""

    prompts: int
    rounds: int
    warmup: int = 1

    def __post_init__(self) -> None:
        if min(self.prompts, self.rounds) < 1 or self.warmup < 0:
            raise ValueError("prompts and rounds must be at least 1, warmup at least 0")


@dataclass(frozen=True)
class StatisticsSettings:
    """``confidence`` of every interval, ``resamples`` of the bootstrap, ``margin`` of equal accuracy."""

    confidence: float = 0.95
    resamples: int = 2000
    margin: float = 0.02

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1 or not 0 < self.margin < 1 or self.resamples < 1:
            raise ValueError("confidence and margin must lie between 0 and 1, resamples must be at least 1")


@dataclass(frozen=True)
class Study:
    """A whole study, checked; ``systems`` holds the points of the sweeps as well."""

    about: str
    task: Task
    models: dict[str, Model]
    systems: dict[str, System]
    race: Race
    sweeps: dict[str, Sweep] = field(default_factory=dict)
    statistics: StatisticsSettings = StatisticsSettings()
    split: str = "test"
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1

    def __post_init__(self) -> None:
        if self.split not in self.task.counts:
            raise ValueError(f"split is {self.split!r}; {nearest(self.split, self.task.counts)}")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype is {self.dtype!r}: choose float32, bfloat16 or float16")
        if self.threads < 1:
            raise ValueError(f"threads is {self.threads}: give a whole number of at least 1")
        for name, model in self.models.items():
            if model.start and model.start not in self.models:
                raise ValueError(f"models.{name}.start: no model {model.start!r}; {nearest(model.start, self.models)}")
            if model.measured_by and model.measured_by not in self.systems:
                raise ValueError(
                    f"models.{name}.measured_by: no system {model.measured_by!r}; "
                    f"{nearest(model.measured_by, self.systems)}"
                )
        for name, system in self.systems.items():
            if system.model not in self.models:
                raise ValueError(
                    f"systems.{name}.model: no model {system.model!r}; {nearest(system.model, self.models)}"
                )


def expand_sweeps(systems: dict[str, System], sweeps: dict[str, Sweep]) -> dict[str, System]:
    """The systems with one more for each point of each sweep, named like ``d2f-block_size~8``."""
    found = dict(systems)
    for name, sweep in sweeps.items():
        if sweep.of not in systems:
            raise ValueError(f"sweeps.{name}.of: no system {sweep.of!r}; {nearest(sweep.of, systems)}")
        base = systems[sweep.of]
        for values in itertools.product(*sweep.vary.values()):
            point = dict(zip(sweep.vary, values, strict=True))
            label = "-".join([sweep.of, *(f"{key}~{value}" for key, value in point.items())])
            try:
                found[label] = dataclasses.replace(
                    base, settings={**base.settings, **point}, problems=sweep.problems, sweep=name
                )
            except ValueError as error:
                raise ValueError(f"sweeps.{name}: {error}") from None
    return found


def parse_study(values: dict, where: str) -> Study:
    """Check a parsed study file."""
    study = build(Study, values, where)
    try:
        return dataclasses.replace(study, systems=expand_sweeps(study.systems, study.sweeps))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def load_study(name: str, folder: Path = STUDIES) -> Study:
    """Read and check ``config/studies/<name>.yaml``.

    Raises:
        ValueError: no such study, or the file is not a valid study; one line.
    """
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if not known:
        raise ValueError(f"{folder} is not here: run from the root of the repository (or give --directory)")
    if name not in known:
        raise ValueError(f"no study {name!r}; {nearest(name, known)}")
    path = folder / f"{name}.yaml"
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    return parse_study(values, str(path))


def digest(study: Study) -> str:
    """Short SHA-256 over the parsed study."""
    text = json.dumps(dataclasses.asdict(study), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
