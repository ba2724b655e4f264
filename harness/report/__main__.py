"""``python -m harness.report --results results/laptop``."""

from backbone.cli import run
from harness.report import main

if __name__ == "__main__":
    run(main)
