"""Tables hold what was measured, say what was not, and the answer claims no more than the numbers carry."""

import json

import pandas as pd
import pytest

from harness.report.answer import answer
from harness.results import write_result
from harness.statistics import paired_accuracy
from harness.tables import WIDTH, attribution, main, read_summary, sweeps, systems, terminal, write_tables


def make_system(speed=1000.0, *, decoder="d2f", accuracy=0.9, difference=0.0, reach=0.01, p_value=0.5, **rest) -> dict:
    """One entry of ``systems``; AR runs at 1000 useful tokens/s."""
    ratio = speed / 1000
    return {
        "decoder": decoder,
        "model": "student",
        "forward": "lean",
        "settings": {},
        "sweep": None,
        "problems": 500,
        "accuracy": accuracy,
        "accuracy_interval": [accuracy - 0.03, accuracy + 0.02],
        "useful_tokens_per_second": speed,
        "latency_seconds": 0.04,
        "tokens_per_forward": 2.5,
        "token_efficiency": 0.25,
        "forwards": 34.0,
        "length": 86.0,
        "peak_memory_bytes": 4.0e8,
        "ratio_to_ar": [ratio, 0.95 * ratio, 1.05 * ratio],
        "ratio_to_vanilla": [9.0, 8.5, 9.5],
        "versus_ar": {
            "problems": 500,
            "difference": difference,
            "interval": [difference - reach, difference + reach],
            "p_value": p_value,
        },
        "attribution_to_ar": {"useful_share": 0.5, "tokens_per_forward": 4.0, "forwards_per_second": ratio / 2},
        **rest,
    }


def make_summary(**d2f) -> dict:
    """A small laptop study; ``d2f`` changes the D2F system."""
    return {
        "study": "laptop",
        "study_digest": "0123456789abcdef",
        "commit": "c0ffee",
        "task": "word-problems",
        "split": "test",
        "max_new_tokens": 128,
        "machine": {"cpu": "Test <CPU> & Co", "device": "cpu", "dtype": "float32", "threads": 1, "python": "3.11.7"},
        "seconds": {"total": 512.3, "race": 98.0},
        "models": {"student": {"accuracy": 0.9, "problems": 500, "parameters": 871000}},
        "statistics": {"confidence": 0.95, "margin": 0.02},
        "systems": {
            "ar": make_system(1000, decoder="autoregressive", difference=0, reach=0, p_value=1.0),
            "ar-module": make_system(420, decoder="autoregressive", forward="module"),
            "vanilla-paper": make_system(110, decoder="llada"),
            "d2f": make_system(**{"speed": 1840, "settings": {"block_size": 16}, **d2f}),
            "d2f-block_size~32": make_system(1900, settings={"block_size": 32}, sweep="block-size"),
            "d2f-block_size~8": make_system(1500, settings={"block_size": 8}, sweep="block-size"),
            "d2f-tau_conf~0.7": make_system(2200, settings={"tau_conf": 0.7}, sweep="threshold", accuracy=0.8),
        },
    }


def store(summary: dict, results) -> None:
    write_result(results / "summary.json", "d2f-suite/summary", summary)


def test_systems_are_the_main_rows_with_a_column_per_number():
    frame = systems(make_summary()).set_index("system")
    assert list(frame.index) == ["ar", "ar-module", "vanilla-paper", "d2f"]
    row = frame.loc["d2f"]
    assert (row["accuracy"], row["accuracy_low"], row["accuracy_high"]) == (0.9, 0.87, 0.92)
    assert (row["ratio_to_ar"], row["ratio_to_ar_low"]) == (1.84, 0.95 * 1.84)
    assert row["problems"] == 500 and row["commit"] == "c0ffee"


def test_attribution_multiplies_up_to_the_ratio():
    frame = attribution(make_summary())
    assert list(frame["product"]) == pytest.approx(list(frame["ratio_to_ar"]))


def test_sweeps_hold_their_base_with_its_default_settings_in_order():
    frame = sweeps(make_summary())
    blocks = frame[frame["sweep"] == "block-size"]
    assert list(blocks["block_size"]) == [8, 16, 32] and list(blocks["base"]) == [False, True, False]
    assert list(frame[frame["sweep"] == "threshold"]["tau_conf"]) == [0.7, 0.9]


def test_files_are_written_and_rebuilt_to_the_same_bytes(tmp_path):
    store(make_summary(), tmp_path)
    main(["--results", str(tmp_path)])
    first = {path.name: path.read_bytes() for path in (tmp_path / "tables").iterdir()}
    assert set(first) == {f"{name}.{kind}" for name in ("systems", "attribution", "sweeps") for kind in ("csv", "md")}
    main(["--results", str(tmp_path)])
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "tables").iterdir()}
    assert pd.read_csv(tmp_path / "tables/systems.csv")["useful_tokens_per_second"].tolist() == [1000, 420, 110, 1840]
    assert "1.84 [1.75, 1.93]" in first["systems.md"].decode()


UNMEASURED = dict.fromkeys(
    ("useful_tokens_per_second", "ratio_to_ar", "versus_ar", "attribution_to_ar", "peak_memory_bytes")
)


def test_what_was_not_measured_says_so(tmp_path):
    summary = make_summary()
    summary["systems"]["d2f"].update(UNMEASURED)
    write_tables(summary, tmp_path)
    for name in ("systems", "attribution"):
        for kind in ("csv", "md"):
            line = next(t for t in (tmp_path / f"tables/{name}.{kind}").read_text().splitlines() if "d2f" in t)
            assert "not measured" in line
    text = terminal(summary)
    assert "not measured" in text and "was not measured" in text and "were not compared" in text


def test_a_speed_without_accuracy_is_not_shown():
    row = systems(make_summary(accuracy=0.9, **{})).set_index("system").loc["d2f"]
    assert row["useful_tokens_per_second"] == 1840
    summary = make_summary()
    summary["systems"]["d2f"]["accuracy"] = None
    row = systems(summary).set_index("system").loc["d2f"]
    assert pd.isna(row["useful_tokens_per_second"]) and pd.isna(row["ratio_to_ar"])


def test_a_study_without_sweeps_or_d2f(tmp_path):
    summary = make_summary()
    summary["systems"] = {"ar": summary["systems"]["ar"]}
    write_tables(summary, tmp_path)
    assert "no sweeps" in (tmp_path / "tables/sweeps.md").read_text()
    assert (tmp_path / "tables/sweeps.csv").read_text().startswith("sweep,system,base")
    assert "no system 'd2f'" in terminal(summary)


def test_a_bar_in_a_name_does_not_end_a_cell(tmp_path):
    summary = make_summary()
    summary["systems"]["a|b"] = make_system()
    write_tables(summary, tmp_path)
    assert "| a\\|b |" in (tmp_path / "tables/systems.md").read_text()


def test_terminal_is_aligned_ascii_and_narrow():
    summary = make_summary()
    summary["systems"]["a-name-that-is-far-too-long-for-any-terminal-and-goes-on-and-on-and-on"] = make_system()
    text = terminal(summary)
    assert text.isascii() and max(map(len, text.splitlines())) <= WIDTH
    table = text.split("\n\n")[0].splitlines()
    assert len({len(line) for line in table}) == 1
    assert "block_size" not in text


def test_faster_and_equivalent():
    found, text = (
        answer(make_summary(difference=-0.004, reach=0.012)),
        terminal(make_summary(difference=-0.004, reach=0.012)),
    )
    assert (found.speed, found.quality) == ("faster", "equal")
    flat = " ".join(text.split())
    assert "d2f is faster than ar: 1.84 times its useful tokens per second (95% interval 1.75 to 1.93)." in flat
    assert "Accuracy is equal within the margin of 2 points: difference -0.4 points (95% interval -1.6 to +0.8" in flat


def test_no_difference_found_is_never_called_equal():
    summary = make_summary(difference=-0.01, reach=0.03, p_value=0.4)
    found, flat = answer(summary), " ".join(terminal(summary).split())
    assert (found.speed, found.quality) == ("faster", "undecided")
    assert "No accuracy difference found, but one beyond the margin of 2 points is not ruled out" in flat
    assert "equal" not in flat and "same" not in flat


def test_slower_and_less_accurate():
    summary = make_summary(speed=700, difference=-0.08, reach=0.03, p_value=0.0001)
    found, flat = answer(summary), " ".join(terminal(summary).split())
    assert (found.speed, found.quality) == ("slower", "worse")
    assert "d2f is slower than ar: 0.70 times" in flat and "Accuracy is lower: difference -8.0 points" in flat


def test_a_ratio_around_one_is_no_speed_difference():
    assert answer(make_summary(speed=1010)).speed == "undecided"


@pytest.mark.parametrize(("problems", "quality"), [(20, "undecided"), (500, "equal")])
def test_agreement_on_a_few_problems_is_no_equality(problems, quality):
    right = dict.fromkeys(range(problems), True)
    assert answer(make_summary(versus_ar=paired_accuracy(right, right))).quality == quality


def test_a_difference_inside_the_margin_is_not_called_none():
    found = answer(make_summary(difference=-0.01, reach=0.005, p_value=0.001))
    assert found.quality == "equal" and "though not the same" in found.about_quality


def test_broken_summaries_are_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="does not exist: run"):
        read_summary(tmp_path)
    store(make_summary(), tmp_path)
    path = tmp_path / "summary.json"
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cut off"):
        read_summary(tmp_path)
    path.write_text(json.dumps({**json.loads(whole), "version": 99}))
    with pytest.raises(ValueError, match="99"):
        read_summary(tmp_path)
    path.write_text(json.dumps({**json.loads(whole), "systems": {}}))
    with pytest.raises(ValueError, match="has no 'systems'"):
        read_summary(tmp_path)
