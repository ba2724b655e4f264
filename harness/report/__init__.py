"""The report: one HTML page that answers the study's question first and then says why, how and how surely.

Self-contained: no request leaves the page, the figures are inline SVG. ``answer`` finds the words,
``states`` and ``style`` serve the figures, ``sections`` writes the parts, ``page.html`` holds the prose that
is the same for every study.

``python -m harness.report --results results/laptop`` writes ``<results>/report.html``.
"""

from __future__ import annotations

from pathlib import Path


def build(results: Path) -> str:
    """The page for a results folder; what is missing there is said in its place."""
    from harness.report.sections import page  # here: the figures it needs import this package

    return page(results)


def main(argv: list[str]) -> None:
    from backbone.cli import Parser
    from harness.results import write_text

    parser = Parser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True, metavar="FOLDER", help="of a study, with summary.json")
    results = parser.parse_args(argv).results
    write_text(results / "report.html", build(results))
