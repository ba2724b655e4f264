"""Figures are functions of their data, come out the same bytes, and say what is missing."""

import pytest

from backbone.trace import DONE, FULL, SEMI, Step, Trace, write_traces
from harness import figures
from harness.report.states import CACHED, COMMITTED, DECODED, FULL_MASK, NOT_APPENDED, SEMI_MASK, position_states, runs
from tests.test_tables import UNMEASURED, make_summary, store


def make_trace() -> Trace:
    """Five tokens in blocks of two behind a prompt of ten, the last block cut short by the end token."""
    steps = [
        Step(0.01, 12, 12, [10], [5], [0.99], [(1, FULL)], True),
        Step(0.01, 4, 14, [11, 12], [6, 7], [0.9, 0.95], [(1, FULL), (2, SEMI)]),
        Step(0.01, 6, 16, [13], [8], [0.9], [(1, DONE), (2, FULL), (3, SEMI)]),
        Step(0.01, 4, 16, [14], [0], [0.9], [(2, DONE), (3, FULL)]),
    ]
    return Trace(10, 8, 2, [5, 6, 7, 8, 0], 0.04, steps)


def make_record(number: int = 0, **rest) -> dict:
    """A stored answer of :func:`make_trace`."""
    plain = {"question": "how many ?", "text": "one two three four", "target": "4", "correct": True, "useful": 4}
    return {"id": number, **plain, "trace": make_trace(), **rest}


def store_traces(results, name: str, *records: dict) -> None:
    """Write ``generate/<name>.traces.jsonl``."""
    (results / "generate").mkdir(exist_ok=True)
    stored = [{**record, "trace": record["trace"].to_json()} for record in records]
    write_traces(results / "generate" / f"{name}.traces.jsonl", stored, system=name)


@pytest.fixture
def results(tmp_path):
    store(make_summary(), tmp_path)
    store_traces(tmp_path, "d2f", make_record())
    return tmp_path


def words_of(figure) -> str:
    """All text of a figure."""
    from matplotlib.text import Text

    return " ".join(found.get_text() for found in figure.findobj(Text))


def test_states_of_a_decode():
    assert position_states(make_trace()) == [
        [COMMITTED, FULL_MASK, *[NOT_APPENDED] * 4],
        [DECODED, COMMITTED, COMMITTED, SEMI_MASK, NOT_APPENDED, NOT_APPENDED],
        [DECODED, DECODED, DECODED, COMMITTED, SEMI_MASK, SEMI_MASK],
        [CACHED, CACHED, DECODED, DECODED, COMMITTED, FULL_MASK],
    ]


def test_states_stop_at_the_length_asked_for():
    trace = make_trace()
    trace.max_new_tokens = 5
    assert {len(row) for row in position_states(trace)} == {5}


def test_runs():
    assert runs(["a", "a", "b", "a"]) == [("a", 0, 2), ("b", 2, 3), ("a", 3, 4)]


def test_every_figure_is_three_files_of_the_same_bytes(results):
    figures.main(["--results", str(results)])
    first = {path.name: path.read_bytes() for path in (results / "figures").iterdir()}
    names = ("throughput", "tradeoff", "block-size", "trace")
    assert set(first) == {f"{name}.{kind}" for name in names for kind in ("svg", "png", "csv")}
    figures.main(["--results", str(results)])
    assert first == {path.name: path.read_bytes() for path in (results / "figures").iterdir()}
    assert not any(b"<dc:date>" in content for content in first.values())


def test_a_matplotlibrc_of_the_user_changes_nothing(results):
    import matplotlib

    frame = figures.throughput_data(make_summary())
    plain = figures.as_svg(figures.throughput(frame))
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "none"}):
        assert figures.as_svg(figures.throughput(frame)) == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_bars_carry_speed_ratio_and_accuracy():
    summary = make_summary()
    summary["systems"]["vanilla-paper"].update(UNMEASURED)
    text = words_of(figures.throughput(figures.throughput_data(summary)))
    assert "1,840 · 1.84× AR · 90.0 % right" in text and "not measured" in text and "hatched" in text


def test_tradeoff_labels_cover_neither_each_other_nor_points():
    summary = make_summary()
    for i in range(6):  # six systems in one spot
        summary["systems"][f"twin-{i}"] = {**summary["systems"]["d2f"], "useful_tokens_per_second": 1840 + i}
    frame = figures.tradeoff_data(summary)
    assert list(frame[frame["kind"] == "threshold sweep"]["tau_conf"]) == [0.7, 0.9]
    figure = figures.tradeoff(frame)
    notes = [text for text in figure.axes[0].texts if text.get_text()]
    assert {"ar", "d2f", "twin-5", "τ 0.7"} <= {note.get_text() for note in notes}
    boxes = [note.get_window_extent() for note in notes]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_block_size_panels():
    frame = figures.block_size_data(make_summary())
    assert list(frame["block_size"]) == [8, 16, 32]
    fast, right = figures.block_size(frame).axes
    assert [label.get_text() for label in fast.get_xticklabels()] == ["8", "16", "32"]
    assert fast.get_ylim()[0] == 0 and "%" in right.get_ylabel()


def test_trace_words_only_where_each_has_its_position():
    assert "three" in words_of(figures.trace(make_record()))
    assert "three" not in words_of(figures.trace(make_record(text="three")))


def test_missing_pieces_are_said(tmp_path):
    summary = make_summary()
    summary["systems"] = {"ar": {**summary["systems"]["ar"], **UNMEASURED}}
    store(summary, tmp_path)
    found = figures.all_figures(summary, tmp_path)
    texts = {name: words_of(figure) for name, (_, figure) in found.items()}
    assert "no speed was measured" in texts["throughput"] and "no system has both" in texts["tradeoff"]
    assert "no sweep named block-size" in texts["block-size"] and "no stored trace" in texts["trace"]
    figures.main(["--results", str(tmp_path)])
    assert (tmp_path / "figures/trace.csv").read_text() == "step,position,state\n"


def test_an_accuracy_without_interval_is_still_drawn():
    summary = make_summary()
    for entry in summary["systems"].values():
        entry["accuracy_interval"] = None
    figures.tradeoff(figures.tradeoff_data(summary))
    figures.block_size(figures.block_size_data(summary))


def test_a_cut_off_trace_file_is_refused(results):
    path = results / "generate/d2f.traces.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    with pytest.raises(ValueError, match="cut off"):
        figures.main(["--results", str(results)])
