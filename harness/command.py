"""The command line that the jobs of a study share: ``--study NAME``, ``--results FOLDER``, and what of it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from backbone.cli import Parser
from backbone.settings import nearest
from harness.study import load_study


def study_options(description: str, argv: list[str], part: str = "") -> Namespace:
    """Parse and check the options of a job.

    Args:
        description: for ``--help``.
        argv: arguments.
        part: ``model`` or ``system`` when the job is about one of the study's; adds that option.

    Returns:
        ``study`` (its name), ``loaded`` (the checked study), ``results`` and, if asked for, ``part``'s name.
    """
    parser = Parser(description=description)
    parser.add_argument("--study", required=True, metavar="NAME", help="a file in config/studies, without .yaml")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="default: results/<study>")
    if part:
        parser.add_argument(f"--{part}", required=True, metavar="NAME", help=f"a {part} of the study")
    options = parser.parse_args(argv)
    options.loaded = load_study(options.study)
    options.results = options.results or Path("results") / options.study
    if part:
        known, given = getattr(options.loaded, f"{part}s"), getattr(options, part)
        if given not in known:
            raise ValueError(f"no {part} {given!r} in study {options.study}; {nearest(given, known)}")
    return options
