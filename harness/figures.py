"""Figures of a study: each a function of its data, stored as SVG, PNG and the CSV it was drawn from.

Rebuilding gives the same bytes (see :mod:`harness.report.style`). Colours are told apart by people with any
colour vision: orange against blue, ordered by lightness. A figure without data says what is missing.

``python -m harness.figures --results results/laptop`` writes ``<results>/figures/<name>.{svg,png,csv}``.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from backbone.cli import Parser, run
from backbone.trace import read_traces
from harness.report.states import CACHED, COMMITTED, DECODED, FULL_MASK, NOT_APPENDED, SEMI_MASK, position_states, runs
from harness.report.style import GRID, INK, PAPER, SOFT, as_png, as_svg, empty_figure, label_points, new_figure, styled
from harness.results import write_text
from harness.tables import D2F, NOT_MEASURED, as_frame, read_summary, sweeps, systems

FAMILIES = {"autoregressive": SOFT, "llada": "#cc79a7", "fast-dllm": "#e08e0b", "d2f": "#2277bb"}
OTHER = "#009e73"  # a decoder added later
STATES = {  # state of a position -> its colour and its name in the legend
    NOT_APPENDED: (GRID, "block not appended yet"),
    SEMI_MASK: ("#f7d795", "masked, block semi-activated"),
    FULL_MASK: ("#e08e0b", "masked, block fully activated"),
    COMMITTED: ("#8a1253", "committed in this step"),
    DECODED: ("#8ecaf0", "decoded, not cached yet"),
    CACHED: ("#2277bb", "cached"),
}


def colour(decoder: str | None) -> str:
    """One colour per kind of decoder."""
    return FAMILIES.get(decoder, OTHER)


def plain_numbers(axis, ticks: tuple[float, ...] = (1, 2, 5)) -> None:
    """Ticks like 2,000 on a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=ticks))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


def throughput_data(summary: dict):
    """Speed of the main systems."""
    keys = ["system", "decoder", "forward", "useful_tokens_per_second", "ratio_to_ar", "ratio_to_ar_low"]
    return systems(summary)[[*keys, "ratio_to_ar_high", "accuracy"]]


@styled
def throughput(frame):
    """Bars of useful tokens/s, the ratio to AR and the accuracy of the same tokens written behind each."""
    speeds = frame["useful_tokens_per_second"].astype(float)
    if speeds.isna().all():
        return empty_figure("throughput: no speed was measured in this study")
    figure = new_figure(6.6, 0.32 * len(frame) + 0.9)
    axes = figure.subplots()
    wide = speeds.max() > 15 * speeds.min()  # then the slow ones would be slivers on a linear scale
    start = speeds.min() / 2 if wide else 0
    for place, row in enumerate(frame.to_dict("records")):
        hollow = row["forward"] == "module"
        tone, speed = colour(row["decoder"]), row["useful_tokens_per_second"]
        if not speed > 0:
            axes.annotate(
                "not measured", (0, place), (4, 0), ("axes fraction", "data"), "offset points", va="center", color=SOFT
            )
            continue
        axes.barh(
            place,
            speed - start,
            0.66,
            start,
            color=PAPER if hollow else tone,
            edgecolor=tone,
            hatch="////" if hollow else "",
        )
        axes.annotate(bar_label(row), (speed, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(frame)), frame["system"])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    if wide:
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
    axes.set_xlim(start, start * (speeds.max() / start) ** 1.55 if wide else speeds.max() * 1.55)  # room for the labels
    axes.set_xticks([tick for tick in axes.get_xticks() if start <= tick <= 1.1 * speeds.max()])
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:,g}")
    hatched = ", hatched: transformers' forward" if (frame["forward"] == "module").any() else ""
    axes.set_xlabel(f"useful tokens per second{' (log scale)' if wide else ''}{hatched}")
    return figure


def bar_label(row: dict) -> str:
    """What stands behind a bar."""
    parts = [f"{row['useful_tokens_per_second']:,.0f}"]
    if row["ratio_to_ar"] == row["ratio_to_ar"] and row["ratio_to_ar"] is not None:
        parts.append(f"{row['ratio_to_ar']:.2f}× AR")
    parts.append(f"{100 * row['accuracy']:.1f} % right")
    return " · ".join(parts)


def tradeoff_data(summary: dict):
    """Speed and accuracy of the main systems, and of the points of sweeps over a threshold."""
    numbers = ["useful_tokens_per_second", "accuracy", "accuracy_low", "accuracy_high"]
    main, swept = systems(summary), sweeps(summary)
    rows = [{"kind": "system", **row} for row in main[["system", "decoder", "forward", *numbers]].to_dict("records")]
    if "tau_conf" in swept:
        lines = swept[swept["sweep"] == "threshold"][["system", "tau_conf", *numbers]]
        rows += [{"kind": "threshold sweep", **row} for row in lines.to_dict("records")]
    return as_frame(rows, ["kind", "system", "decoder", "forward", "tau_conf", *numbers])


@styled
def tradeoff(frame):
    """Accuracy with its interval against speed: upper right is better."""
    frame = measured(frame, "useful_tokens_per_second", "accuracy")
    points, line = frame[frame["kind"] == "system"], frame[frame["kind"] != "system"]
    if points.empty:
        return empty_figure("trade-off: no system has both a speed and an accuracy")
    figure = new_figure(6.6, 4.4)
    axes = figure.subplots()
    for row in points.to_dict("records"):
        error_bar(axes, row, "useful_tokens_per_second", colour(row["decoder"]), hollow=row["forward"] == "module")
    if len(line):
        axes.plot(line["useful_tokens_per_second"], 100 * line["accuracy"], "o-", ms=3, lw=1, color=INK, zorder=1)
    axes.set_xscale("log")
    speeds = frame["useful_tokens_per_second"]
    axes.set_xlim(speeds.min() / 1.35, speeds.max() * 1.35)
    plain_numbers(axes.xaxis, (1, 2, 5) if speeds.max() > 4 * speeds.min() else tuple(range(1, 10)))
    accuracy_axis(axes, frame)
    axes.set_xlabel("useful tokens per second (log scale)")
    axes.grid(True, lw=0.6)
    axes.set_axisbelow(True)
    swept = line[~line["system"].isin(points["system"])]  # the base of the sweep has its label already
    rows = [(row["system"], row) for row in points.to_dict("records")]
    rows += [(f"τ {row['tau_conf']:g}", row) for row in swept.to_dict("records")]
    label_points(
        figure,
        axes,
        [(text, row["useful_tokens_per_second"], 100 * row["accuracy"]) for text, row in rows],
        visible_bars(points) + between(line),
    )
    return figure


def visible_bars(points) -> list[tuple[float, float, float]]:
    """The error bars of systems as (x, low, high)."""
    keys = ["useful_tokens_per_second", "accuracy_low", "accuracy_high"]
    return [(x, 100 * low, 100 * high) for x, low, high in points[keys].itertuples(index=False)]


def between(line, parts: int = 12) -> list[tuple[float, float, float]]:
    """Spots along the drawn line of a sweep, so that no label is written over it."""
    spots = list(zip(line["useful_tokens_per_second"], 100 * line["accuracy"], strict=True))
    found = []
    for (x, y), (to_x, to_y) in itertools.pairwise(spots):
        found += [(x + (to_x - x) * i / parts, *2 * (y + (to_y - y) * i / parts,)) for i in range(parts + 1)]
    return found


def measured(frame, *keys: str):
    """The rows that have all of ``keys``; an accuracy without interval gets one of no width."""
    frame = frame.dropna(subset=list(keys))
    ends = {end: frame[end].fillna(frame["accuracy"]) for end in ("accuracy_low", "accuracy_high")}
    return frame.assign(**ends)


def error_bar(axes, row: dict, key: str, tone: str, hollow: bool = False) -> None:
    """A point with the interval of its accuracy, in percent."""
    value = 100 * row["accuracy"]
    # never below 0, where rounding would put an interval that ends at its own value
    reach = [[max(0, value - 100 * row["accuracy_low"])], [max(0, 100 * row["accuracy_high"] - value)]]
    face = PAPER if hollow else tone
    axes.errorbar(row[key], value, reach, fmt="o", ms=6, color=tone, mfc=face, elinewidth=1, capsize=2, zorder=2)


def accuracy_axis(axes, frame) -> None:
    """Percent, from a little under the lowest interval to a little over the highest."""
    low, high = 100 * frame["accuracy_low"].min(), 100 * frame["accuracy_high"].max()
    room = 0.08 * max(high - low, 1)
    axes.set_ylim(low - room, high + room)
    axes.set_ylabel("exactly right answers (%)")


def block_size_data(summary: dict):
    """The sweep over block sizes, its base system included."""
    frame = sweeps(summary)
    keys = ["system", "block_size", "useful_tokens_per_second", "accuracy", "accuracy_low", "accuracy_high"]
    if "block_size" not in frame:
        return as_frame([], keys)
    return frame[frame["sweep"] == "block-size"][keys]


@styled
def block_size(frame):
    """What larger blocks do to speed and to accuracy."""
    frame = measured(frame, "useful_tokens_per_second", "accuracy", "block_size")
    if frame.empty:
        return empty_figure("block size: this study has no sweep named block-size")
    figure = new_figure(6.6, 2.9)
    fast, right = figure.subplots(1, 2)
    fast.plot(frame["block_size"], frame["useful_tokens_per_second"], "o-", color=FAMILIES["d2f"], lw=1.2, ms=5)
    fast.set_ylim(0, 1.15 * frame["useful_tokens_per_second"].max())
    fast.set_ylabel("useful tokens per second")
    fast.yaxis.set_major_formatter("{x:,.0f}")
    right.plot(frame["block_size"], 100 * frame["accuracy"], "-", color=FAMILIES["d2f"], lw=1.2)
    for row in frame.to_dict("records"):
        error_bar(right, row, "block_size", FAMILIES["d2f"])
    accuracy_axis(right, frame)
    for axes in (fast, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(frame["block_size"], [f"{size:g}" for size in frame["block_size"]])
        axes.minorticks_off()
        axes.set_xlabel("block size (tokens)")
        axes.grid(True, lw=0.6)
        axes.set_axisbelow(True)
    return figure


def drawn_record(results: Path) -> dict | None:
    """The D2F decode that is drawn: of the first problem, so that nobody picked it."""
    path = results / "generate" / f"{D2F}.traces.jsonl"
    if not path.exists():
        return None
    _, records = read_traces(path)
    return next((record for record in records if record["trace"].block_size), None)


def trace_data(record: dict | None):
    """A row per step and position."""
    rows = position_states(record["trace"]) if record else []
    cells = [
        {"step": step, "position": place, "state": name}
        for step, row in enumerate(rows, 1)
        for place, name in enumerate(row)
    ]
    return as_frame(cells, ["step", "position", "state"])


@styled
def trace(record: dict | None):
    """One decode as a picture: positions to the right, steps downwards, coloured by what is happening there."""
    rows = position_states(record["trace"]) if record else []
    if not rows:
        return empty_figure("trace: there is no stored trace of a system with blocks")
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    length, size = len(rows[0]), record["trace"].block_size
    figure = new_figure(8.6, min(9, max(2.2, 0.1 * len(rows))) + 1.6)
    axes = figure.subplots()
    for name, (tone, _) in STATES.items():
        spans = [
            (start, stop, step) for step, row in enumerate(rows, 1) for kind, start, stop in runs(row) if kind == name
        ]
        corners = [[(a, y - 0.47), (b, y - 0.47), (b, y + 0.47), (a, y + 0.47)] for a, b, y in spans]
        axes.add_collection(PolyCollection(corners, facecolors=tone, linewidths=0))
    borders = range(0, length + 1, size)
    axes.vlines(borders, 0.4, len(rows) + 0.6, color=PAPER, lw=2)
    axes.vlines(borders, 0.4, len(rows) + 0.6, color=SOFT, lw=0.7, ls=(0, (2, 2)))
    axes.set_xlim(0, length)
    axes.set_ylim(len(rows) + 0.6, 0.4)
    axes.set_xticks(borders)
    axes.set_xlabel(f"answer position (dashed: borders of blocks of {size})")
    axes.set_ylabel("step (one forward each)")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.spines[:].set_visible(False)
    write_words(axes, record, length)
    keys = [Patch(color=tone, label=label) for tone, label in STATES.values()]
    figure.legend(handles=keys, loc="outside lower center", ncols=3, fontsize=8)
    return figure


def write_words(axes, record: dict, length: int) -> None:
    """The answer's words above their positions, if there is a word per position and room to read them."""
    words, answer = record["text"].split(), record["trace"].tokens
    if len(words) in (len(answer), len(answer) - 1) and length <= 104:  # without or with an end token
        size = min(8, 520 / length)
        for place, word in enumerate(words):
            axes.annotate(
                word.replace("$", r"\$"), (place + 0.5, 1), (size / 3, 3), ("data", "axes fraction"), "offset points",
                rotation=90, rotation_mode="anchor", ha="left", va="baseline", fontsize=size,
            )  # fmt: skip


def all_figures(summary: dict, results: Path) -> dict[str, tuple]:
    """Name -> (data, figure)."""
    record = drawn_record(results)
    found = {}
    for name, data, draw in (
        ("throughput", throughput_data, throughput),
        ("tradeoff", tradeoff_data, tradeoff),
        ("block-size", block_size_data, block_size),
    ):
        frame = data(summary)
        found[name] = (frame, draw(frame))
    found["trace"] = (trace_data(record), trace(record))
    return found


def write_figures(summary: dict, results: Path) -> None:
    """Write every figure to ``<results>/figures``."""
    folder = results / "figures"
    for name, (frame, figure) in all_figures(summary, results).items():
        write_text(folder / f"{name}.csv", frame.to_csv(index=False, na_rep=NOT_MEASURED, lineterminator="\n"))
        write_text(folder / f"{name}.svg", as_svg(figure))
        scratch = folder / f"{name}.png.tmp"
        scratch.write_bytes(as_png(figure))
        os.replace(scratch, folder / f"{name}.png")


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True, metavar="FOLDER", help="of a study, with summary.json")
    options = parser.parse_args(argv)
    write_figures(read_summary(options.results), options.results)


if __name__ == "__main__":
    run(main)
