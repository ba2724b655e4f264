"""Traces on disk: what is written comes back, and nothing else is believed."""

from __future__ import annotations

import json

import pytest
import torch

from backbone.trace import DONE, FULL, SCHEMA, SEMI, Recorder, Step, Trace, read_traces, write_traces
from d2f.decoding import D2FDecoder, D2FSettings
from tests.models import random_prompt, tiny_network


def made() -> Trace:
    steps = [
        Step(0.25, 12, 12, [8, 9], [5, 6], [0.91, 0.5], [(1, FULL)], prefill=True),
        Step(0.125, 8, 16, [], [], [], [(1, DONE), (2, SEMI)]),
        Step(0.0625, 1, 17, [10], [0]),
    ]
    return Trace(8, 6, 4, [5, 6, 0], 0.5, steps)


def written(path, *traces: Trace, **header):
    write_traces(path, [{"id": n, "trace": trace.to_json()} for n, trace in enumerate(traces)], **header)
    return path


def test_round_trip(tmp_path):
    header, records = read_traces(written(tmp_path / "t.jsonl", made(), made(), system="d2f"))
    assert header["system"] == "d2f" and header["records"] == 2
    assert [record["id"] for record in records] == [0, 1]
    assert [record["trace"] for record in records] == [made(), made()]
    assert not (tmp_path / "t.jsonl.tmp").exists()


def test_round_trip_of_a_real_decode(tmp_path):
    """Counts and tokens exactly; times and confidences to the digits that are kept."""
    trace = D2FDecoder(tiny_network(), D2FSettings(block_size=4, tau_conf=0.4)).decode(random_prompt(6, 0), 18)
    back = read_traces(written(tmp_path / "t.jsonl", trace))[1][0]["trace"]
    assert (back.tokens, back.prompt_length, back.block_size) == (trace.tokens, 6, 4)
    for ours, theirs in zip(trace.steps, back.steps, strict=True):
        for name in ("fed", "context", "positions", "tokens", "blocks", "prefill"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert theirs.confidences == pytest.approx(ours.confidences, abs=1e-5)
        assert theirs.seconds == pytest.approx(ours.seconds, abs=1e-7)
    assert sum(step.seconds for step in trace.steps) <= trace.seconds


def test_no_records_is_a_valid_file(tmp_path):
    assert read_traces(written(tmp_path / "t.jsonl"))[1] == []


@pytest.mark.parametrize("keep", [0.3, 0.7, 0.99])
def test_a_file_that_was_cut_off_is_refused(tmp_path, keep):
    path = written(tmp_path / "t.jsonl", made(), made())
    text = path.read_text()
    path.write_text(text[: int(len(text) * keep)])
    with pytest.raises(ValueError, match=r"t\.jsonl is cut off \(it should hold 2 traces\).*run again"):
        read_traces(path)


def test_a_missing_line_is_noticed(tmp_path):
    path = written(tmp_path / "t.jsonl", made(), made())
    path.write_text("\n".join(path.read_text().splitlines()[:2]) + "\n")
    with pytest.raises(ValueError, match="cut off"):
        read_traces(path)


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"schema": SCHEMA, "version": 99, "records": 0}) + "\n")
    with pytest.raises(ValueError, match="trace version 99, this suite reads 1"):
        read_traces(path)


@pytest.mark.parametrize(
    "text",
    ["", "\n", "no json", "[]", "3", '{"a": 1}', '{"schema": "other", "version": 1, "records": 0}',
     json.dumps({"schema": SCHEMA}), json.dumps({"schema": SCHEMA, "version": 1})],
)  # fmt: skip
def test_what_is_no_trace_file_is_refused(tmp_path, text):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a trace file"):
        read_traces(path)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = written(tmp_path / "t.jsonl", made())
    before = path.read_text()
    with pytest.raises(TypeError):
        write_traces(path, [{"id": 0, "trace": made().to_json()}, {"id": {1}}])
    assert path.read_text() == before


def test_recorder_adds_up():
    recorder = Recorder(torch.device("cpu"))
    for number in range(3):
        recorder.step(4, 10, [number], [7], prefill=number == 0)
    trace = recorder.trace(6, 3, 0, [7, 7, 7])
    assert [step.prefill for step in trace.steps] == [True, False, False]
    assert 0 < sum(step.seconds for step in trace.steps) <= trace.seconds
