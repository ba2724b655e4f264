"""Progress lines on stderr: what runs, how far it is, how fast, and when it will be done."""

from __future__ import annotations

import sys
import time


def duration(seconds: float) -> str:
    """``95.2`` as ``1 min 35 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class Progress:
    """At most one line every ``every`` seconds, so that it reads well in a log file as well.

    Args:
        label: what runs.
        total: how many units there are.
        unit: what is counted ("step", "problem").
        start: units that were done before this process (a resumed run).
        every: least seconds between two lines.
    """

    def __init__(self, label: str, total: int, unit: str, start: int = 0, every: float = 5.0) -> None:
        self.label, self.total, self.unit, self.start, self.every = label, total, unit, start, every
        self.begun = time.perf_counter()
        self.last = self.begun
        if start:
            self._say(f"resumed at {unit} {start} of {total}")

    def _say(self, text: str) -> None:
        print(f"[{self.label}] {text}", file=sys.stderr, flush=True)

    def at(self, count: int, note: str = "") -> None:
        """Report that ``count`` units are done."""
        now = time.perf_counter()
        if now - self.last < self.every or count <= self.start:
            return
        self.last = now
        left = (now - self.begun) / (count - self.start) * (self.total - count)
        self._say(f"{self.unit} {count} of {self.total}, {note + ', ' if note else ''}{duration(left)} left")

    def done(self, note: str = "") -> None:
        spent = duration(time.perf_counter() - self.begun)
        self._say(f"done: {self.total} {self.unit}s in {spent}{', ' + note if note else ''}")
