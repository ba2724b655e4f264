"""Tables of a study, from ``summary.json`` alone.

A speed is only worth as much as the accuracy of the same tokens, so every row carries both, and a row
without accuracy shows no speed. ``<results>/tables/<name>.csv`` holds raw numbers, ``.md`` the same for
people. What was not measured says so and is never 0.

``python -m harness.tables --results results/laptop`` writes the tables, ``--terminal`` prints the short one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from pathlib import Path

from backbone.cli import Parser, run
from harness.results import read_result, write_text

AR, D2F = "ar", "d2f"
NOT_MEASURED = "not measured"
WIDTH = 110  # columns of the table in the terminal
NEEDED = ("study", "study_digest", "commit", "machine", "statistics", "systems")
SPEEDS = ("useful_tokens_per_second", "latency_seconds", "ratio_to_ar", "ratio_to_vanilla")
PLAIN = ("useful_tokens_per_second", "latency_seconds", "tokens_per_forward", "token_efficiency", "forwards", "length")
FACTORS = ("useful_share", "tokens_per_forward", "forwards_per_second")


def read_summary(results: Path) -> dict:
    """``summary.json`` of a results folder.

    Raises:
        ValueError: absent, cut off, incomplete, or of a version this suite does not read.
    """
    path = results / "summary.json"
    if not path.exists():
        raise ValueError(f"{path} does not exist: run `snakemake --cores all --config study={results.name}` first")
    summary = read_result(path, "d2f-suite/summary")
    absent = [key for key in NEEDED if not summary.get(key)]
    if absent:
        raise ValueError(f"{path} has no {absent[0]!r}: delete it and run again")
    return summary


def is_main(entry: dict) -> bool:
    """Whether a system is one of the study's own rows and not a point of a sweep."""
    return not entry.get("sweep")


def spread(key: str, values: list | None, names: tuple[str, ...]) -> dict:
    """``[value, low, high]`` as one column per number."""
    return dict(zip((key + name for name in names), values or [None] * len(names), strict=True))


def difference(entry: dict) -> dict:
    """The paired accuracy difference to AR, one column per number."""
    found = entry.get("versus_ar") or {}
    low, high = found.get("interval") or (None, None)
    return {
        "difference_to_ar": found.get("difference"),
        "difference_to_ar_low": low,
        "difference_to_ar_high": high,
        "p_value": found.get("p_value"),
        "shared_problems": found.get("problems"),
    }


def numbers(entry: dict) -> dict:
    """Everything measured of one system as a flat row."""
    if entry.get("accuracy") is None:  # a speed is not shown without the accuracy of its tokens
        entry = {**entry, **dict.fromkeys(SPEEDS)}
    interval = (entry.get("accuracy"), *(entry.get("accuracy_interval") or (None, None)))
    return {
        **{key: entry.get(key) for key in PLAIN},
        **spread("accuracy", list(interval), ("", "_low", "_high")),
        "problems": entry.get("problems"),
        "peak_memory_bytes": entry.get("peak_memory_bytes"),
        **spread("ratio_to_ar", entry.get("ratio_to_ar"), ("", "_low", "_high")),
        **spread("ratio_to_vanilla", entry.get("ratio_to_vanilla"), ("", "_low", "_high")),
        **difference(entry),
    }


def as_frame(rows: list[dict], columns: list[str]):
    """A DataFrame with these columns, whole numbers whole also where one is missing."""
    import pandas as pd

    frame = pd.DataFrame(rows, columns=columns)
    whole = [key for key in ("problems", "shared_problems") if key in columns]
    return frame.astype(dict.fromkeys(whole, "Int64"))


def origin(summary: dict) -> dict:
    """Which run a row comes from."""
    digests = summary["study_digest"]
    digest = digests if isinstance(digests, str) else " ".join(digests)
    return {"study": summary["study"], "study_digest": digest, "commit": summary["commit"]}


def systems(summary: dict):
    """One row per main system."""
    rows = [
        {
            "system": name,
            **{key: entry.get(key) for key in ("decoder", "model", "forward")},
            "settings": json.dumps(entry.get("settings") or {}, sort_keys=True),
            **numbers(entry),
            **origin(summary),
        }
        for name, entry in summary["systems"].items()
        if is_main(entry)
    ]
    return as_frame(rows, list(rows[0]) if rows else ["system", *numbers({})])


def attribution(summary: dict):
    """Why each main system is faster or slower than AR: three factors, their product, and the ratio itself."""
    rows = []
    for name, entry in summary["systems"].items():
        if is_main(entry):
            factors = entry.get("attribution_to_ar") or dict.fromkeys(FACTORS)
            known = [factors[key] for key in FACTORS if factors[key] is not None]
            product = math.prod(known) if len(known) == len(FACTORS) else None
            ratio = numbers(entry)["ratio_to_ar"]
            row = {"system": name, **factors, "product": product, "ratio_to_ar": ratio}
            rows.append({**row, **origin(summary)})
    return as_frame(rows, ["system", *FACTORS, "product", "ratio_to_ar", *origin(summary)])


def settings_of(entry: dict) -> dict:
    """All settings of a system, defaults included."""
    from harness.systems import DECODERS

    known = DECODERS.get(entry.get("decoder"))
    return {**(dataclasses.asdict(known[1]()) if known else {}), **(entry.get("settings") or {})}


def sweep_points(summary: dict) -> dict[str, list[str]]:
    """Names of the systems of each sweep, the system it varies among them (as far as it is in the summary)."""
    found: dict[str, list[str]] = {}
    mains = [name for name, entry in summary["systems"].items() if is_main(entry)]
    for name, entry in summary["systems"].items():
        if not is_main(entry):
            bases = [main for main in mains if name.startswith(main + "-")]
            points = found.setdefault(entry["sweep"], sorted(bases, key=len)[-1:])
            points.append(name)
    return found


def sweeps(summary: dict):
    """One row per point of each sweep, in order of the settings that vary; its base system is a point as well."""
    entries = summary["systems"]
    rows, varied = [], []
    for sweep, names in sweep_points(summary).items():
        settings = {name: settings_of(entries[name]) for name in names}
        keys = sorted({key for values in settings.values() for key in values})
        moving = [key for key in keys if len({repr(values.get(key)) for values in settings.values()}) > 1]
        varied += [key for key in moving if key not in varied]
        for name in sorted(names, key=lambda name: [ordered(settings[name].get(key)) for key in moving]):
            about = {"sweep": sweep, "system": name, "base": is_main(entries[name])}
            rows.append({**settings[name], **about, **numbers(entries[name]), **origin(summary)})
    measured = numbers({})
    return as_frame(rows, ["sweep", "system", "base", *varied, *measured, *origin(summary)])


def ordered(value):
    """A sort key for settings of any kind: numbers first."""
    return (0, value, "") if isinstance(value, int | float) else (1, 0, str(value))


TABLES = {"systems": systems, "attribution": attribution, "sweeps": sweeps}


def shown(value, form: str = "{:.2f}", scale: float = 1) -> str:
    """A number for people."""
    missing = value is None or value != value or str(value) == "<NA>"  # None, NaN, pandas' NA
    return NOT_MEASURED if missing else form.format(value * scale if isinstance(value, int | float) else value)


def ranged(row: dict, key: str, form: str = "{:.2f}", scale: float = 1, unit: str = "") -> str:
    """A number and its interval, ``1.84 [1.80, 1.88]``."""
    value, low, high = (shown(row.get(key + end), form, scale) for end in ("", "_low", "_high"))
    if value == NOT_MEASURED:
        return value
    return f"{value}{unit}" + ("" if NOT_MEASURED in (low, high) else f" [{low}, {high}]")


def points_apart(row: dict) -> str:
    """The paired accuracy difference in percentage points, with its test."""
    if row["system"] == AR:
        return "reference"
    text = ranged(row, "difference_to_ar", "{:+.1f}", 100)
    p_value = shown(row.get("p_value"), "{:.2g}")
    return text if NOT_MEASURED in (text, p_value) else f"{text}, p = {p_value}"


MEASURED = {
    "Useful tokens/s": lambda row: shown(row["useful_tokens_per_second"], "{:,.0f}"),
    "Ratio to AR": lambda row: ranged(row, "ratio_to_ar"),
    "Ratio to vanilla-paper": lambda row: ranged(row, "ratio_to_vanilla"),
    "Accuracy (%)": lambda row: ranged(row, "accuracy", "{:.1f}", 100),
    "Accuracy minus AR's (points)": points_apart,
    "Latency (ms/answer)": lambda row: shown(row["latency_seconds"], "{:,.1f}", 1000),
    "Tokens/forward": lambda row: shown(row["tokens_per_forward"]),
    "Token efficiency": lambda row: shown(row["token_efficiency"], "{:.3f}"),
    "Forwards/answer": lambda row: shown(row["forwards"], "{:.1f}"),
    "Length (tokens)": lambda row: shown(row["length"], "{:.1f}"),
    "Peak memory (MiB)": lambda row: shown(row["peak_memory_bytes"], "{:,.0f}", 2**-20),
    "Problems": lambda row: shown(row["problems"], "{:,}"),
}
ATTRIBUTED = {
    "Useful / committed": lambda row: shown(row["useful_share"], "{:.3f}"),
    "Committed / forward": lambda row: shown(row["tokens_per_forward"], "{:.3f}"),
    "Forwards / second": lambda row: shown(row["forwards_per_second"], "{:.3f}"),
    "Product": lambda row: shown(row["product"], "{:.3f}"),
    "Ratio to AR": lambda row: shown(row["ratio_to_ar"], "{:.3f}"),
}


def for_people(name: str, frame) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of a table as text."""
    columns = {"System": lambda row: row["system"], **(ATTRIBUTED if name == "attribution" else MEASURED)}
    if name == "sweeps":
        varied = list(frame.columns[3 : list(frame.columns).index(PLAIN[0])])
        moving = {f"`{key}`": lambda row, key=key: shown(row[key], "{}") for key in varied}
        columns = {"Sweep": lambda row: row["sweep"], **moving, **columns}
    return list(columns), [[str(cell(row)) for cell in columns.values()] for row in frame.to_dict("records")]


def markdown(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; a bar in a cell does not end it."""
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def footnote(summary: dict) -> str:
    """Which run the numbers come from, in one sentence."""
    run_of, machine = origin(summary), summary["machine"]
    return (
        f"Study {run_of['study']} (digest {run_of['study_digest']}), commit {run_of['commit']}, "
        f"{machine.get('cpu', 'unknown CPU')}, device {machine.get('device', 'unknown')}, "
        f"{machine.get('dtype', 'unknown precision')}, {machine.get('threads', '?')} thread(s). "
        f"Brackets: {summary['statistics']['confidence']:.0%} intervals. "
    )


def write_tables(summary: dict, results: Path) -> None:
    """Write every table to ``<results>/tables``."""
    for name, make in TABLES.items():
        frame = make(summary)
        # not a gap: an empty cell does not say why it is empty
        text = frame.to_csv(index=False, na_rep=NOT_MEASURED, lineterminator="\n")
        write_text(results / "tables" / f"{name}.csv", text)
        body = markdown(*for_people(name, frame)) if len(frame) else f"This study has no {name}.\n"
        write_text(results / "tables" / f"{name}.md", f"{body}\n{footnote(summary).strip()}\n")


SHORT = {
    "tokens/s": "Useful tokens/s",
    "ratio to AR": "Ratio to AR",
    "accuracy (%)": "Accuracy (%)",
    "ms/answer": "Latency (ms/answer)",
    "tokens/forward": "Tokens/forward",
    "problems": "Problems",
}


def terminal(summary: dict) -> str:
    """The main systems as aligned plain text of at most 110 columns, and the answer."""
    from harness.report.answer import answer  # which is built on this module

    headings, rows = for_people("systems", systems(summary))
    picked = [0, *(headings.index(heading) for heading in SHORT.values())]
    lines = [["system", *SHORT], *([row[i] for i in picked] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    widths[0] = max(8, min(widths[0], WIDTH - sum(widths[1:]) - 2 * len(SHORT)))
    table = [
        "  ".join([line[0][: widths[0]].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    ]
    found = answer(summary)
    sentences = textwrap.wrap(f"{found.about_speed} {found.about_quality}", WIDTH)
    return "\n".join([table[0], "-" * max(map(len, table)), *table[1:], "", *sentences]) + "\n"


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True, metavar="FOLDER", help="of a study, with summary.json")
    parser.add_argument("--terminal", action="store_true", help="print the short table and the answer; write nothing")
    options = parser.parse_args(argv)
    summary = read_summary(options.results)
    if options.terminal:
        print(terminal(summary), end="")
        print(f"\nReport: {options.results}/report.html\nEvery run side by side: mlflow ui")
    else:
        write_tables(summary, options.results)


if __name__ == "__main__":
    run(main)
