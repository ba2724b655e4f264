"""``Step`` and ``Trace``: what one decode did, step by step. Every number of the suite is computed from these.

A trace is stored as one JSON object; a file of traces is JSON lines whose first line is a header with
the schema's name and version. A reader refuses what it does not know and what was cut off.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

SCHEMA, VERSION = "d2f-suite/traces", 1

# What a live block is doing, as one letter in ``Step.blocks``
SEMI, FULL, DONE = "s", "f", "d"  # semi-activated, fully activated, finished (its clean states go into the cache)


@dataclass(slots=True)
class Step:
    """One forward and what was decided from it.

    Args:
        seconds: wall time of the step, device-synchronised.
        fed: positions that went through the network.
        context: slots each fed position could see at most.
        positions: committed positions, absolute.
        tokens: their tokens.
        confidences: their probabilities (empty for AR, which does not compute them).
        blocks: live blocks as ``(number, state)``, numbered from 1 behind the prompt; empty where there are none.
        prefill: whether this forward read the prompt.
    """

    seconds: float
    fed: int
    context: int
    positions: list[int]
    tokens: list[int]
    confidences: list[float] = field(default_factory=list)
    blocks: list[tuple[int, str]] = field(default_factory=list)
    prefill: bool = False


@dataclass(slots=True)
class Trace:
    """One decode of one prompt.

    Args:
        prompt_length: P, in tokens.
        max_new_tokens: what was asked for.
        block_size: of the decoder; 0 where it has no blocks.
        tokens: the answer as the decoder left it: with ``after_eos: stop`` it ends with its first end token, with
            ``finish`` whatever was decoded behind that is there too.
        seconds: wall time from submit to done, everything included.
        steps: in order.
    """

    prompt_length: int
    max_new_tokens: int
    block_size: int
    tokens: list[int]
    seconds: float
    steps: list[Step]

    def to_json(self) -> dict:
        """Columns instead of a list of steps: a third of the size, and readable as a table."""
        columns = {name: [getattr(step, name) for step in self.steps] for name in Step.__slots__}
        columns["seconds"] = [round(s, 7) for s in columns["seconds"]]
        columns["confidences"] = [[round(c, 5) for c in row] for row in columns["confidences"]]
        head = {name: getattr(self, name) for name in Trace.__slots__ if name != "steps"}
        return {**head, "steps": columns}

    @classmethod
    def from_json(cls, data: dict) -> Trace:
        columns = data["steps"]
        rows = zip(*(columns[name] for name in Step.__slots__), strict=True)
        steps = [Step(*row) for row in rows]
        for step in steps:
            step.blocks = [tuple(block) for block in step.blocks]
        return cls(**{name: data[name] for name in Trace.__slots__ if name != "steps"}, steps=steps)


class Recorder:
    """Collects the steps of one decode, of one row or several in lockstep; reads the clock so that decoders do not."""

    def __init__(self, device: torch.device, rows: int = 1) -> None:
        self.device, self.rows = device, [[] for _ in range(rows)]
        self.begun = self.last = self._now()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def step(self, fed: int, context: int, positions: list[int], tokens: list[int], **rest) -> None:
        """Note a step of a single row that ends now and began when the last one ended."""
        self.lockstep(fed, context, [{"positions": positions, "tokens": tokens, **rest}])

    def lockstep(self, fed: int, context: int, rows: list[dict], **common) -> None:
        """Note one forward of all rows, with what each row committed (fields of :class:`Step`)."""
        now = self._now()
        for steps, row in zip(self.rows, rows, strict=True):
            steps.append(Step(now - self.last, fed, context, **row, **common))
        self.last = now

    def trace(self, prompt_length: int, max_new_tokens: int, block_size: int, tokens: list[int], row: int = 0) -> Trace:
        """The trace of one row, which ends now."""
        seconds = self._now() - self.begun
        return Trace(prompt_length, max_new_tokens, block_size, tokens, seconds, self.rows[row])


def write_traces(path: Path, records: Iterable[dict], **header) -> None:
    """Write trace records (``{"id": ..., "trace": Trace.to_json(), ...}``) whole or not at all."""
    scratch = path.with_name(path.name + ".tmp")
    records = list(records)
    with scratch.open("w") as file:
        file.write(json.dumps({"schema": SCHEMA, "version": VERSION, "records": len(records), **header}) + "\n")
        for record in records:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
    scratch.replace(path)


def read_traces(path: Path) -> tuple[dict, list[dict]]:
    """The header and the records, each with ``trace`` as a :class:`Trace`.

    Raises:
        ValueError: not a trace file, another version, or fewer records than the header promises.
    """
    lines = path.read_text().splitlines()
    try:
        header = json.loads(lines[0])
        version, promised = header["version"], header["records"]
        if header["schema"] != SCHEMA:
            raise KeyError(header["schema"])
    except (IndexError, KeyError, TypeError, json.JSONDecodeError):
        raise ValueError(f"{path} is not a trace file: delete it and run again") from None
    if version != VERSION:
        raise ValueError(f"{path} has trace version {version}, this suite reads {VERSION}: delete it and run again")
    try:
        records = [json.loads(line) for line in lines[1:]]
    except json.JSONDecodeError:
        records = []
    if len(records) != promised:
        raise ValueError(f"{path} is cut off (it should hold {promised} traces): delete it and run again")
    for record in records:
        record["trace"] = Trace.from_json(record["trace"])
    return header, records
