"""Study files: every mistake is one line that names the key and the nearest valid one."""

import copy
import dataclasses

import pytest
import yaml

from backbone.settings import build, convert
from harness.study import STUDIES, digest, load_study, parse_study

SMOKE = yaml.safe_load((STUDIES / "smoke.yaml").read_text())


def changed(path: str, value) -> dict:
    """The smoke study with one key (dotted path) set; ``None`` as value deletes it."""
    values = copy.deepcopy(SMOKE)
    *parents, last = path.split(".")
    place = values
    for key in parents:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return values


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_study_is_valid(path):
    study = load_study(path.stem)
    assert study.systems and len(digest(study)) == 16


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("tasks", {}, ["'tasks'", "'task'"]),
        ("task.sed", 1, ["sed", "'seed'"]),
        ("task", None, ["'task'", "missing"]),
        ("models.student.training.learning_rat", 1, ["learning_rat", "'learning_rate'"]),
        ("models.student.training.steps", "many", ["training.steps", "'many'", "whole number"]),
        ("models.student.training.steps", 1.5, ["whole number"]),
        ("models.student.training.steps", 0, ["at least 1"]),
        ("models.student.training.learning_rate", ".inf", ["number"]),
        ("models.student.kind", "studnet", ["'studnet'", "'student'"]),
        ("models.student.start", "techer", ["'techer'", "'teacher'"]),
        ("models.student.measured_by", "d2", ["'d2'"]),
        ("models.student.distillation.schedule", "steeep", ["schedule", "steep"]),
        ("models.student.distillation.ratios", [0.7, 0.2], ["0.7", "lowest"]),
        ("systems.d2f.decoder", "d2g", ["'d2g'", "'d2f'"]),
        ("systems.d2f.model", "studnt", ["'studnt'", "'student'"]),
        ("systems.d2f.settings.block_sise", 8, ["block_sise", "'block_size'"]),
        ("systems.d2f.settings.block_size", 0, ["block_size", "0"]),
        ("systems.d2f.settings.tau_conf", 1.1, ["tau_conf", "1.1", "0 to 1"]),
        ("systems.d2f.forward", "leen", ["'leen'", "'lean'"]),
        ("systems.fast-dllm-dual.settings.cache", "dul", ["'dul'", "dual"]),
        ("sweeps.threshold.of", "d2", ["'d2'"]),
        ("sweeps.threshold.vary", {"tau_conf": [2]}, ["tau_conf", "2"]),
        ("sweeps.threshold.vary", {"tau_cnf": [0.5]}, ["tau_cnf", "'tau_conf'"]),
        ("split", "tset", ["'tset'", "'test'"]),
        ("dtype", "float8", ["float8"]),
        ("threads", 0, ["threads"]),
        ("threads", True, ["whole number"]),
        ("race.prompts", 0, ["prompts"]),
        ("task.difficulty.steps", [3], ["2 values"]),
        ("task.difficulty.value_max", 200, ["value_max", "99"]),
        ("statistics", {"confidence": 95}, ["confidence"]),
    ],
)
def test_a_mistake_is_one_line_that_names_it(path, value, words):
    with pytest.raises(ValueError) as caught:
        parse_study(changed(path, value), "smoke.yaml")
    message = str(caught.value)
    assert "\n" not in message and message.startswith("smoke.yaml")
    for word in words:
        assert word in message


def test_numbers_that_yaml_reads_as_text_are_numbers():
    assert yaml.safe_load("x: 1e-5") == {"x": "1e-5"}  # why this matters
    study = parse_study(changed("models.student.training.learning_rate", "1e-5"), "smoke.yaml")
    assert study.models["student"].training.learning_rate == 1e-5


def test_an_unknown_study_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'laptop'"):
        load_study("latpop")


def test_another_folder_says_where_to_run_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="root of the repository"):
        load_study("laptop")


def test_broken_yaml_is_one_line(tmp_path):
    (tmp_path / "bad.yaml").write_text("task: [1,\n")
    with pytest.raises(ValueError) as caught:
        load_study("bad", tmp_path)
    assert "bad.yaml is not valid YAML" in str(caught.value) and "\n" not in str(caught.value)


def test_the_digest_follows_numbers_not_comments():
    base = parse_study(copy.deepcopy(SMOKE), "smoke")
    other = parse_study(changed("race.prompts", 5), "smoke")
    assert digest(base) == digest(parse_study(copy.deepcopy(SMOKE), "elsewhere")) != digest(other)


def test_sweep_points_are_systems_with_the_varied_setting():
    study = parse_study(changed("sweeps.threshold.vary", {"tau_conf": [0.5], "block_size": [4, 8]}), "smoke")
    point = study.systems["d2f-tau_conf~0.5-block_size~4"]
    assert point.settings == {"block_size": 4, "tau_conf": 0.5} and point.sweep == "threshold"
    assert point.model == study.systems["d2f"].model


def test_build_refuses_what_is_not_a_mapping():
    @dataclasses.dataclass(frozen=True)
    class Pair:
        a: int
        b: tuple[float, ...] = ()

    assert build(Pair, {"a": "3", "b": ["1e-3", 2]}, "x") == Pair(3, (1e-3, 2.0))
    with pytest.raises(ValueError, match="give a mapping"):
        build(Pair, [1], "x")
    with pytest.raises(ValueError, match="give a list"):
        build(Pair, {"a": 1, "b": 2}, "x")
    assert convert(float | None, None, "x") is None
