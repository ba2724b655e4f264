"""From problems to the summary on tiny models: what is measured is what was decoded, and damage is refused."""

import json
import shutil
from pathlib import Path

import pytest

from backbone.trace import read_traces
from harness.fetch import fetch
from harness.generation import generate
from harness.provenance import file_digest
from harness.race import race
from harness.results import read_result, write_result
from harness.study import Model, load_study
from harness.summary import summarise
from harness.tasks.prepare import prepare
from harness.train import save

SYSTEMS = ("ar", "vanilla-paper", "d2f")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A results folder of the smoke study with three systems, and that study."""
    import dataclasses

    results = tmp_path_factory.mktemp("results")
    study = load_study("smoke")
    study = dataclasses.replace(
        study,
        task=dataclasses.replace(study.task, counts={"train": 200, "test": 6}),
        systems={name: dataclasses.replace(study.systems[name], problems=0) for name in SYSTEMS},
        models={
            name: dataclasses.replace(model, measured_by={"teacher": "vanilla-paper"}.get(name, model.measured_by))
            for name, model in study.models.items()
        },
    )
    prepare(study.task, study.split, results / "data")
    for name in study.models:
        save("smoke", study, name, results)
    for name in SYSTEMS:
        generate("smoke", study, name, results)
    race("smoke", study, results)
    return study, results


@pytest.fixture
def folder(measured, tmp_path):
    """A copy that a test may damage."""
    study, results = measured
    shutil.copytree(results, tmp_path / "results")
    return study, tmp_path / "results"


def test_scores_are_those_of_the_stored_texts(measured):
    _, results = measured
    for name in SYSTEMS:
        header, records = read_traces(results / "generate" / f"{name}.traces.jsonl")
        assert header["system"] == name and [r["id"] for r in records] == list(range(6))
        for record in records:
            said = record["text"].split("####")[-1].split() if "####" in record["text"] else []
            assert record["correct"] == (bool(said) and said[0] == record["target"])
        result = read_result(results / "generate" / f"{name}.json", "d2f-suite/result")
        assert result["accuracy"] == pytest.approx(sum(r["correct"] for r in records) / 6)
        assert result["counts"]["useful"] == sum(r["useful"] for r in records)


def test_summary_holds_every_system_and_exact_attribution(measured):
    study, results = measured
    values = summarise("smoke", study, results)
    assert list(values["systems"]) == list(SYSTEMS)
    ar = values["systems"]["ar"]
    assert ar["ratio_to_ar"] == (1.0, 1.0, 1.0) and ar["tokens_per_forward"] == 1.0
    for system in values["systems"].values():
        factors = system["attribution_to_ar"]
        product = factors["useful_share"] * factors["tokens_per_forward"] * factors["forwards_per_second"]
        assert product == pytest.approx(system["ratio_to_ar"][0], rel=1e-9)
    assert values["systems"]["vanilla-paper"]["forwards"] == study.task.max_new_tokens


def test_an_interrupted_generation_goes_on_with_the_same_tokens(folder, monkeypatch):
    from harness import language_model

    study, results = folder
    _, before = read_traces(results / "generate" / "d2f.traces.jsonl")
    decode, calls = language_model.DecoderLM._decode, []

    def dies_at_the_fourth(self, number, context, stops):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(number)
        return decode(self, number, context, stops)

    monkeypatch.setattr(language_model.DecoderLM, "_decode", dies_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        generate("smoke", study, "d2f", results)
    state = results / "state" / "generate-d2f.jsonl"
    state.write_text(state.read_text() + '{"id": 3, "te')  # a line cut off by the kill
    resumed = []

    def counts(self, number, context, stops):
        resumed.append(number)
        return decode(self, number, context, stops)

    monkeypatch.setattr(language_model.DecoderLM, "_decode", counts)
    generate("smoke", study, "d2f", results)
    assert calls == [0, 1, 2] and resumed == [3, 4, 5]
    _, after = read_traces(results / "generate" / "d2f.traces.jsonl")
    assert [r["trace"].tokens for r in after] == [r["trace"].tokens for r in before]
    assert not state.exists()


def test_other_settings_never_continue_an_interrupted_generation(folder):
    study, results = folder
    state = results / "state" / "generate-d2f.jsonl"
    state.write_text("another fingerprint\n" + json.dumps({"id": 0, "text": "wrong", "useful": 1, "trace": {}}) + "\n")
    generate("smoke", study, "d2f", results)
    _, records = read_traces(results / "generate" / "d2f.traces.jsonl")
    assert records[0]["text"] != "wrong"


def test_a_race_that_decoded_other_tokens_is_refused(folder):
    study, results = folder
    path = results / "race.traces.jsonl"
    lines = path.read_text().splitlines()
    record = json.loads(lines[1])
    record["trace"]["tokens"][0] += 1
    path.write_text("\n".join([lines[0], json.dumps(record), *lines[2:]]) + "\n")
    with pytest.raises(ValueError, match="other tokens than generate scored"):
        summarise("smoke", study, results)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "cut off"),
        (lambda text: text.replace('"version": 1', '"version": 9'), "delete it and run again"),
        (lambda text: "[]", "delete it and run again"),
    ],
)
def test_a_damaged_result_is_one_line(folder, damage, words):
    study, results = folder
    path = results / "generate" / "ar.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match=words):
        summarise("smoke", study, results)


def test_results_of_two_machines_are_refused(folder):
    study, results = folder
    path = results / "generate" / "ar.json"
    values = read_result(path, "d2f-suite/result")
    values["machine"]["cpu"] = "another"
    write_result(path, "d2f-suite/result", {k: v for k, v in values.items() if k not in ("schema", "version")})
    with pytest.raises(ValueError, match="2 machines"):
        summarise("smoke", study, results)


def test_training_twice_gives_the_same_weights(folder):
    study, results = folder
    digests = {name: file_digest(results / "models" / name / "model.safetensors") for name in study.models}
    save("smoke", study, "student", results)
    assert file_digest(results / "models" / "student" / "model.safetensors") == digests["student"]
    assert len(set(digests.values())) == 3
    record = read_result(results / "models" / "student" / "training.json", "d2f-suite/training")
    assert record["sha256"] == digests["student"]


def test_fetch_takes_only_what_the_study_pins(measured, tmp_path):
    _, results = measured
    source = results / "models" / "ar"
    good = Model(kind="fetch", measured_by="ar", source=str(source), sha256=file_digest(source / "model.safetensors"))
    fetch("ar", good, tmp_path / "ar")
    assert (tmp_path / "ar" / "network.json").exists()
    bad = Model(kind="fetch", measured_by="ar", source=str(source), sha256="0" * 64)
    with pytest.raises(ValueError, match="the study pins 0000"):
        fetch("ar", bad, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    missing = Model(kind="fetch", measured_by="ar", source=str(tmp_path / "none"), sha256="0" * 64)
    with pytest.raises(FileNotFoundError, match="make models"):
        fetch("ar", missing, tmp_path / "other")


def test_a_gpu_that_is_absent_is_one_line(measured):
    import torch

    from backbone.network import load_network

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    _, results = measured
    with pytest.raises(ValueError, match="finds no GPU here"):
        load_network(Path(results) / "models" / "ar", device="cuda")
