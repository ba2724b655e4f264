"""The word-level tokenizer of the word problems: every word and every number up to 99 is one token."""

from __future__ import annotations

from harness.tasks.problems import vocabulary

END, MASK, BAR = "<eos>", "<mask>", "|"


def make_tokenizer():
    """A transformers fast tokenizer; ids: end 0, mask 1, bar 2, then :func:`vocabulary`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate([END, MASK, BAR, *vocabulary()])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, mask_token=MASK)
