"""The picture that ``python -m d2f.generate --watch`` draws: the answer, block by block, as it fills.

Every step is drawn from what :class:`d2f.decoding.D2FDecoder` hands to its ``watch`` callback: the answer so
far and the live blocks with their state. A block that is no longer live is finished and cached. On a
terminal the picture is drawn over the last one, blocks coloured by state; elsewhere each step is a plain
line that names the states.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from backbone.trace import DONE, FULL, SEMI

NAMES = {SEMI: "semi-activated", FULL: "fully activated", DONE: "finished"}
COLOURS = {SEMI: "33", FULL: "36", DONE: "32"}  # yellow, cyan, green
DIM, BORDER, MASK = "2", "|", "·"


@dataclass(frozen=True)
class Cell:
    """One word of the picture: a token, a mask, or the border of a block."""

    text: str
    style: str = ""  # of an ANSI colour sequence


def width_of(text: str) -> int:
    """Columns that ``text`` takes in a terminal."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def printable(text: str) -> str:
    """``text`` without what would move the cursor, in one word."""
    return "".join(c if c.isprintable() else " " for c in text).strip() or "''"


def shown_blocks(answer: list[int], live: list[tuple[int, str]], block_size: int) -> list[tuple[str, list[int]]]:
    """(state, tokens) of every block that exists so far; those in front of the live ones are cached."""
    states = dict(live)
    return [
        (states.get(number, DONE), answer[(number - 1) * block_size : number * block_size])
        for number in range(1, live[-1][0] + 1)
    ]


def cells(
    blocks: list[tuple[str, list[int]]], mask_id: int, spell: Callable[[int], str], glyph: str = MASK
) -> list[Cell]:
    """The words to draw, front to back."""
    found = []
    for number, (state, tokens) in enumerate(blocks):
        if number:
            found.append(Cell(BORDER, DIM))
        for token in tokens:
            found.append(Cell(glyph, DIM) if token == mask_id else Cell(spell(token), COLOURS[state]))
        if all(token == mask_id for token in tokens):  # nothing to colour yet: let the masks show the state
            found[-len(tokens) :] = [Cell(glyph, f"{DIM};{COLOURS[state]}")] * len(tokens)
    return found


def wrap(words: list[Cell], width: int) -> list[list[Cell]]:
    """Lines of at most ``width`` columns, words separated by one space; a longer word is cut."""
    lines, used = [[]], 0
    for word in words:
        text = word.text
        while width_of(text) > width:
            text = text[:-1]
        needed = width_of(text) + bool(lines[-1])
        if used + needed > width and lines[-1]:
            lines.append([])
            used, needed = 0, width_of(text)
        lines[-1].append(Cell(text, word.style))
        used += needed
    return lines


def paint(line: list[Cell], colour: bool) -> str:
    """One line of the picture, with or without ANSI colours."""
    return " ".join(f"\x1b[{cell.style}m{cell.text}\x1b[0m" if colour and cell.style else cell.text for cell in line)


class Watcher:
    """Draws after every step.

    Args:
        tokenizer: spells tokens.
        mask_id: of the network.
        block_size: B.
        delay: seconds to wait after each step; None waits 0.15 s on a terminal and not at all elsewhere.
        out: where to draw.
    """

    def __init__(self, tokenizer, mask_id: int, block_size: int, delay: float | None = None, out: TextIO | None = None):
        self.tokenizer, self.mask_id, self.block_size = tokenizer, mask_id, block_size
        self.out = sys.stdout if out is None else out
        self.redraw = self.out.isatty() and os.environ.get("TERM") != "dumb"
        self.colour = self.redraw and not os.environ.get("NO_COLOR")
        self.delay = (0.15 if self.redraw else 0.0) if delay is None else delay
        self.glyph = MASK if "utf" in (self.out.encoding or "").lower() else "."
        self.steps = self.drawn = 0

    def spell(self, token: int) -> str:
        return printable(self.tokenizer.decode([token]))

    def __call__(self, answer: list[int], live: list[tuple[int, str]]) -> None:
        """Draw one step."""
        self.steps += 1
        blocks = shown_blocks(answer, live, self.block_size)
        self.picture(blocks) if self.redraw else self.plain(blocks)
        time.sleep(self.delay)

    def plain(self, blocks: list[tuple[str, list[int]]]) -> None:
        """A line per step, each block led by its state."""
        parts = []
        for state, tokens in blocks:
            words = " ".join(self.glyph if token == self.mask_id else self.spell(token) for token in tokens)
            parts.append(f"({NAMES[state]}) {words}")
        print(f"step {self.steps}: " + f" {BORDER} ".join(parts), file=self.out, flush=True)

    def picture(self, blocks: list[tuple[str, list[int]]]) -> None:
        """Draw over the last picture; of one taller than the terminal, the end."""
        columns, rows = shutil.get_terminal_size()
        legend = [Cell(f"step {self.steps}:"), *(Cell(NAMES[s].replace(" ", "-"), COLOURS[s]) for s in NAMES)]
        lines = wrap(cells(blocks, self.mask_id, self.spell, self.glyph), max(1, columns - 1))
        lines = (wrap(legend, max(1, columns - 1)) + lines)[-max(1, rows - 1) :]
        back = f"\x1b[{self.drawn}F\x1b[J" if self.drawn else ""
        self.out.write(back + "".join(paint(line, self.colour) + "\n" for line in lines))
        self.out.flush()
        self.drawn = len(lines)
