"""Answer one question with D2F: ``python -m d2f.generate --prompt "mia has 9 books . ..." --watch``.

Loads a model folder of this suite, decodes, and prints the answer and what it cost. Settings come from
the folder's ``decoding.json`` (what the study measured the model with); every one can be overridden.
With ``--watch`` the answer is drawn after each step, so that one sees blocks start before those in front
of them are done.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from backbone.cli import Parser, run

if TYPE_CHECKING:  # torch takes seconds to import: --help and mistakes should not
    from backbone.network import Network
    from backbone.trace import Trace
    from d2f.decoding import D2FSettings

MODEL = Path("results/laptop/models/student")
OVERRIDES = ("block_size", "tau_add", "tau_act", "tau_conf")


def device(text: str) -> str:
    """A device that torch can be asked for."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no device: give cpu, cuda or cuda:N")
    return text


def seconds(text: str) -> float:
    """A finite number of at least 0."""
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is no waiting time: give seconds, at least 0")
    return value


def parser() -> Parser:
    """The command line; what is not given comes from the model folder."""
    found = Parser(prog="python -m d2f.generate", description=__doc__)
    found.add_argument("--prompt", required=True, help="the question, in words that the model knows")
    found.add_argument("--model", type=Path, default=MODEL, help=f"model folder (default: {MODEL})")
    found.add_argument("--max-new-tokens", type=int, help="longest answer, in tokens")
    found.add_argument("--block-size", type=int, help="tokens per block")
    found.add_argument(
        "--tau-add", type=float, help="decoded share of the last block that lets the next one start, 0 to 1"
    )
    found.add_argument("--tau-act", type=float, help="decoded share of a block that fully activates the next, 0 to 1")
    found.add_argument("--tau-conf", type=float, help="confidence above which a token is committed, 0 to 1")
    found.add_argument("--device", type=device, default="cpu", help="cpu (default), cuda or cuda:N")
    found.add_argument("--watch", action="store_true", help="draw the answer after each step")
    found.add_argument("--delay", type=seconds, help="seconds between drawn steps (default: 0.15 on a terminal)")
    return found


def stored_decoding(folder: Path) -> tuple[dict, int]:
    """Settings and answer length from ``decoding.json``; ``({}, 128)`` without one."""
    path = folder / "decoding.json"
    if not path.exists():
        return {}, 128
    try:
        held = json.loads(path.read_text())
        return dict(held["settings"]), int(held["max_new_tokens"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} does not hold max_new_tokens and settings: write it again or delete it") from None


def settings_of(stored: dict, options: argparse.Namespace, where: Path) -> D2FSettings:
    """The decoder's settings: what is stored, less what the command line overrides."""
    from backbone.settings import build
    from d2f.decoding import D2FSettings

    given = {name: getattr(options, name) for name in OVERRIDES if getattr(options, name) is not None}
    build(D2FSettings, stored, str(where / "decoding.json"))
    return build(D2FSettings, {**stored, **given}, "settings")


def load(folder: Path, device: str) -> tuple[Network, object]:
    """The network and the tokenizer of a model folder.

    Raises:
        FileNotFoundError: the folder is not there.
        ValueError: its weights are damaged.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no model in {folder}: run `make` first, or name a model folder with --model")
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from backbone.network import load_network

    logging.disable_progress_bar()
    network = load_network(folder, device=device)
    return network, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def summary(tokens: int, trace: Trace, watched: bool) -> str:
    """What the answer cost, in one line."""
    forwards = len(trace.steps)
    return (
        f"{tokens} tokens, {forwards} forwards, {tokens / forwards:.2f} tokens per forward, "
        f"{trace.seconds:.3f} s, {tokens / trace.seconds:.1f} tokens/s"
        + (" (drawing slows it down: leave out --watch for the speed)" if watched else "")
    )


def main(argv: list[str]) -> None:
    options = parser().parse_args(argv)
    if not options.prompt.strip():
        raise ValueError("the prompt is empty: give a question with --prompt")
    if not options.model.is_dir():  # before the imports, which take seconds
        load(options.model, options.device)
    import torch

    from backbone.examples import PROMPT_FORMAT, encode
    from backbone.selection import answer_length
    from d2f.decoding import D2FDecoder
    from d2f.watch import Watcher

    stored, length = stored_decoding(options.model)
    settings = settings_of(stored, options, options.model)
    length = length if options.max_new_tokens is None else options.max_new_tokens
    network, tokenizer = load(options.model, options.device)
    prompt = torch.tensor(encode(tokenizer, PROMPT_FORMAT.format(question=options.prompt.strip())))
    watcher = None
    if options.watch:
        watcher = Watcher(tokenizer, network.mask_id, settings.block_size, options.delay)
    else:  # the first decode of a process is slower: it is not what we want to time
        D2FDecoder(network, settings).decode(prompt, min(length, settings.block_size))
    trace = D2FDecoder(network, settings, watcher).decode(prompt, length)
    if not trace.steps:
        raise ValueError(
            f"max_new_tokens {length} leaves no room for one block of {settings.block_size} when ragged_tail is floor: raise it"
        )
    tokens = trace.tokens[: answer_length(trace.tokens, network)]
    print(tokenizer.decode(tokens, skip_special_tokens=True))
    print(summary(len(tokens), trace, options.watch))


if __name__ == "__main__":
    run(main)
