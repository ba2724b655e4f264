"""One run at a time in a folder, and no job that outlives a killed run.

Snakemake's own lock stays behind when it is killed, and so do its jobs. The lock here is the kernel's: it
goes away with the process that holds it. Whoever holds it may clear a stale lock of Snakemake's, and jobs
watch the process named by D2F_SUPERVISOR (see :mod:`backbone.cli`) and end within a second after it died.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import TextIO

# what only looks at the workflow; such a call needs no turn
LOOKING = re.compile(
    r"-[a-zA-Z]*n[a-zA-Z]*|--(dry-?run|lint|report|(detailed-)?summary|dag|rulegraph|filegraph|list.*)"
)


def own_interpreter() -> None:
    """Make `python` in the rules the interpreter that runs Snakemake, its environment activated or not."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def take_turn(arguments: list[str], folder: Path = Path(".snakemake")) -> TextIO | None:
    """Hold the folder's lock for the life of this process; returns the open file that must be kept.

    Raises:
        ValueError: another run holds it.
        OSError: the folder cannot be written.
    """
    if any(LOOKING.fullmatch(argument.split("=")[0]) for argument in arguments):
        return None
    try:
        folder.mkdir(exist_ok=True)
        turn = (folder / "turn").open("w")
        fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError("another snakemake is running in this folder: wait until it is done, or stop it") from None
    except OSError as error:
        raise OSError(f"cannot write here ({error}): make the folder writable, or copy the repository") from None
    os.environ["D2F_SUPERVISOR"] = str(os.getpid())
    if any(folder.glob("locks/*")):
        shutil.rmtree(folder / "locks")
        time.sleep(2)  # jobs of the killed run are ending
    return turn
