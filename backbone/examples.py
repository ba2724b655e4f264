"""Training examples: questions and worked answers as token ids, in batches that need no padding mask.

A file of examples is JSON lines with ``question`` and ``answer``. All samples of a batch share one
prompt length, so that one visibility serves the whole batch and the block borders of its rows agree;
which samples make up step ``n`` depends only on that step's generator.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

PROMPT_FORMAT = "{question} |"  # the bar tells the model that the answer starts


def unknown_words(tokenizer, text: str) -> list[str]:
    """The words of ``text`` that a word-level tokenizer does not have, special tokens among them.

    Such a tokenizer quietly reads them as its unknown token. Others spell every word in pieces: ``[]``.
    """
    engine = getattr(tokenizer, "backend_tokenizer", None)
    if engine is None or type(engine.model).__name__ != "WordLevel":
        return []
    known = tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens)
    words = [word for word, _ in engine.pre_tokenizer.pre_tokenize_str(text)]
    return [word for word in dict.fromkeys(words) if word not in known]


def encode(tokenizer, text: str) -> list[int]:
    """Token ids of ``text``.

    Raises:
        ValueError: the vocabulary lacks a word; names each and its nearest known ones, in one line.
    """
    unknown = unknown_words(tokenizer, text)
    if unknown:
        known = sorted(tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens))
        hints = []
        for word in unknown[:5]:
            close = difflib.get_close_matches(word.lower(), known, n=3)
            hints.append(f"{word!r} (nearest: {', '.join(close)})" if close else f"{word!r}")
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise ValueError(
            f"the model's vocabulary of {len(known)} words lacks {', '.join(hints)}{more}: say it in other words"
        )
    return tokenizer(text)["input_ids"]


@dataclass(frozen=True)
class Batch:
    """``ids`` (B, P + R) int64: prompt, answer, end token, end-token padding; ``prompt`` is P."""

    ids: torch.Tensor
    prompt: int

    @property
    def answer_lengths(self) -> torch.Tensor:
        """(B,) tokens of each answer, its first end token included."""
        last = self.ids[:, -1:]  # the padding is the end token
        return (self.ids[:, self.prompt :] != last).sum(dim=1) + 1


class Examples:
    """All examples of a file, grouped by prompt length.

    Args:
        path: JSON lines with ``question`` and ``answer``.
        tokenizer: a transformers tokenizer; its end token closes and pads the answers.
        answer_length: R, the fixed length of the answer region; longer answers are refused.
    """

    def __init__(self, path: Path, tokenizer, answer_length: int) -> None:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if not rows:
            raise ValueError(f"{path} holds no examples")
        prompts = tokenizer([PROMPT_FORMAT.format(question=r["question"]) for r in rows])["input_ids"]
        answers = tokenizer([r["answer"] for r in rows])["input_ids"]
        groups: dict[int, list[list[int]]] = {}
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), 1):
            padding = answer_length - len(answer)
            if padding < 1:
                raise ValueError(
                    f"{path}, line {number}: the answer has {len(answer)} tokens, but answer_length {answer_length} "
                    "leaves no room for its end token: raise answer_length or make the problems shorter"
                )
            groups.setdefault(len(prompt), []).append(prompt + answer + [tokenizer.eos_token_id] * padding)
        self.lengths = sorted(groups)
        self.rows = {length: torch.tensor(groups[length]) for length in self.lengths}
        self.weights = torch.tensor([len(groups[length]) for length in self.lengths], dtype=torch.float64)

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Draw a prompt length in proportion to its samples, then ``size`` samples of that length."""
        length = self.lengths[int(torch.multinomial(self.weights, 1, generator=generator))]
        rows = self.rows[length]
        return Batch(rows[torch.randint(len(rows), (size,), generator=generator)], length)
