"""What every command line of the suite shares: an error is one line that says what to do next.

Mistakes of the user arrive as ``ValueError`` or ``OSError``, a diverged training as
``FloatingPointError``; they become ``error: ...`` and exit code 2. Anything else is a defect of the suite
and keeps its traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # as a shell reports them


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, and whose help keeps the line breaks of its description."""

    def __init__(self, **options) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"error: {message} (--help shows what can be given)\n")


def one_line(error: BaseException) -> str:
    """The message of ``error`` without line breaks; its kind when it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def end_with_supervisor() -> None:
    """End this process when the one named by D2F_SUPERVISOR has died.

    A killed Snakemake leaves its jobs behind; without this they would go on writing beside those of the next run.
    """
    supervisor = os.environ.get("D2F_SUPERVISOR", "")
    if not supervisor.isdigit():
        return

    def watch() -> None:
        while True:
            time.sleep(1)
            try:
                os.kill(int(supervisor), 0)
            except OSError:
                os._exit(INTERRUPTED)

    threading.Thread(target=watch, daemon=True).start()


def run(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Call ``main`` with the arguments of the process and exit with a code that a shell understands."""
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")  # libraries' bars would chop our own progress lines to pieces
    end_with_supervisor()
    try:
        code = main(sys.argv[1:]) or 0
        sys.stdout.flush()  # a closed pipe shows here, not in the interpreter's own goodbye
    except BrokenPipeError:
        # whoever read our output has left (`| head`); without this the interpreter would complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = BROKEN_PIPE
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        code = USAGE
    except KeyboardInterrupt:
        print("interrupted: run the same command again to go on", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)
