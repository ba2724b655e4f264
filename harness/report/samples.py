"""Problems as the systems answered them: the first of the split, and the first on which they part ways.

Both are picked by a rule, so that nobody chose what looks good.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from backbone.trace import read_traces
from harness.tables import is_main


def read_answers(summary: dict, results: Path) -> dict[str, dict[int, dict]]:
    """System -> problem -> record, of the main systems whose traces are there."""
    found = {}
    for name, entry in summary["systems"].items():
        path = results / "generate" / f"{name}.traces.jsonl"
        if is_main(entry) and path.exists():
            found[name] = {record["id"]: record for record in read_traces(path)[1]}
    return {name: records for name, records in found.items() if records}


def pick(answers: dict[str, dict[int, dict]]) -> dict[int, str]:
    """Problem -> why it is shown."""
    shared = sorted(set.intersection(*map(set, answers.values())))
    apart = [number for number in shared if len({records[number]["correct"] for records in answers.values()}) > 1]
    first = dict.fromkeys(shared[:1], "The first problem")
    split = dict.fromkeys(apart[:1], "The first problem that some systems get right and others wrong")
    return split | first if shared[:1] != apart[:1] else first


def one_problem(number: int, heading: str, answers: dict[str, dict[int, dict]]) -> str:
    """Question, expected answer, and each different answer with who gave it."""
    records = {name: by_problem[number] for name, by_problem in answers.items()}
    first = next(iter(records.values()))
    groups: dict[tuple[str, bool], list[str]] = {}
    for name, record in records.items():
        forwards = len(record["trace"].steps)
        groups.setdefault((record["text"], record["correct"]), []).append(f"{name} ({forwards} forwards)")
    parts = [
        f"<h3>{escape(heading)}</h3>",
        f'<div class="sample"><p><strong>Question.</strong> {escape(str(first["question"]))}</p>',
        f"<p><strong>Expected.</strong> {escape(str(first['target']))}</p>",
    ]
    for (text, correct), names in groups.items():
        verdict = '<span class="right">right</span>' if correct else '<span class="wrong">wrong</span>'
        parts.append(f'<p class="by">{escape(", ".join(names))}: {verdict}</p>')
        parts.append(f"<p>{escape(text) or '(nothing)'}</p>")
    return "\n".join([*parts, "</div>"])


def sample_section(summary: dict, results: Path) -> str:
    """The sample problems, or why there are none."""
    answers = read_answers(summary, results)
    problems = pick(answers) if answers else {}
    if not problems:
        return '<p class="note">There are no stored answers in this folder (generate/*.traces.jsonl), so none can be shown.</p>'
    return "\n".join(one_problem(number, heading, answers) for number, heading in sorted(problems.items()))
