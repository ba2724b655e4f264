"""The block-causal visibility against nested loops written from its definition, and the authors' masks."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from d2f.blocks import additive_visibility, block_count, block_numbers, flex_visibility, visible

VECTORS = Path(__file__).parent / "data" / "vectors"


def sizes(count: int, seed: int = 0, longest: int = 40) -> list[tuple[int, int, int]]:
    """Random (prompt, length, block size); the last block is often ragged, some answers are empty."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        prompt = rng.randint(1, 15)
        found.append((prompt, prompt + rng.randint(0, longest - 15), rng.randint(1, 12)))
    return found


def slow_visibility(prompt: int, length: int, block_size: int) -> list[list[bool]]:
    """Walk the blocks: a position sees the prompt and everything up to the end of its own block."""
    end_of = [prompt] * prompt
    while len(end_of) < length:
        end = min(len(end_of) + block_size, length)
        end_of += [end] * (end - len(end_of))
    return [[key < end_of[query] for key in range(length)] for query in range(length)]


@pytest.mark.parametrize(("prompt", "length", "block_size"), sizes(60))
def test_dense_mask_equals_nested_loops(prompt, length, block_size):
    wanted = torch.tensor(slow_visibility(prompt, length, block_size))
    mask = additive_visibility(prompt, length, block_size)
    assert torch.equal(mask == 0, wanted)
    assert torch.equal(mask == float("-inf"), ~wanted)


@pytest.mark.parametrize(("prompt", "length", "block_size"), sizes(12, seed=1))
def test_flex_mask_equals_dense(prompt, length, block_size):
    flex = flex_visibility(prompt, length, block_size)
    wanted = torch.tensor(slow_visibility(prompt, length, block_size))
    index = torch.arange(length)
    zero = torch.tensor(0)
    evaluated = flex.mask_mod(zero, zero, index[:, None].expand(length, length), index[None].expand(length, length))
    assert torch.equal(evaluated, wanted)
    # the coarse map of 128 x 128 tiles may only leave out tiles in which nothing is visible
    assert bool(flex.to_dense()[0, 0, 0, 0]) == bool(wanted.any())


def test_flex_tiles_of_a_long_sequence():
    prompt, length, block_size, tile = 100, 384, 64, 128
    dense = flex_visibility(prompt, length, block_size).to_dense()[0, 0].bool()
    wanted = additive_visibility(prompt, length, block_size) == 0
    tiles = wanted.view(3, tile, 3, tile).any(dim=3).any(dim=1)
    assert torch.equal(dense, tiles)
    assert not tiles.all()  # so there is something to leave out


def test_numbers_start_at_the_end_of_the_prompt():
    assert block_numbers(3, 10, 4).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]


def test_one_block_is_not_causal_and_later_blocks_are_hidden():
    """Negative control: neither the causal mask nor the full one passes for this one."""
    mask = additive_visibility(4, 12, 4) == 0
    assert mask[0, 3] and mask[4, 7]  # later positions of the own block
    assert not mask[3, 4] and not mask[7, 8]  # the first position of the next block
    assert not torch.equal(mask, torch.ones_like(mask).tril())


def test_block_size_of_the_whole_answer_hides_it_from_the_prompt_only():
    mask = additive_visibility(5, 20, 15) == 0
    assert mask[5:].all() and mask[:5, :5].all() and not mask[:5, 5:].any()


def test_predicate_is_elementwise():
    assert visible(torch.tensor([0, 1, 2]), torch.tensor([0, 2, 1])).tolist() == [True, False, True]


def recorded_masks(kind: str) -> list:
    """Parameters (numbers in the name, mask as bool) of one kind of the authors' masks."""
    masks = {name: mask.bool() for name, mask in load_file(VECTORS / "d2f-masks.safetensors").items()}
    return [
        pytest.param([int(n) for n in re.findall(r"\d+", name)], mask, id=name)
        for name, mask in masks.items()
        if name.startswith(kind)
    ]


def evaluated(flex, rows: int, length: int) -> torch.Tensor:
    """(rows, length, length) of a FlexAttention predicate, entry by entry."""
    index = torch.arange(max(rows, length))
    return flex.mask_mod(index[:rows, None, None], torch.tensor(0), index[:length, None], index[:length])


@pytest.mark.parametrize(("numbers", "wanted"), recorded_masks("infer"))
def test_dense_and_flex_equal_the_mask_of_decoding(numbers, wanted):
    prompt, length, _ = numbers
    assert torch.equal(additive_visibility(*numbers) == 0, wanted)
    flex = evaluated(flex_visibility(*numbers), 1, length)
    assert torch.equal(flex.expand(1, length, length)[0], wanted)
    causal = torch.ones_like(wanted).tril()
    assert torch.equal(causal, wanted) == (prompt == length == 1)  # negative control


@pytest.mark.parametrize(("numbers", "wanted"), recorded_masks("extract"))
def test_live_rows_equal_the_mask_of_a_cached_pass(numbers, wanted):
    *whole, start, count, cached = numbers
    live = slice(start, start + count)
    columns = [*range(cached), *range(start, start + count)]
    assert torch.equal((additive_visibility(*whole) == 0)[live][:, columns], wanted)


@pytest.mark.parametrize(("numbers", "wanted"), recorded_masks("train"))
def test_dense_and_flex_equal_the_mask_of_training_with_a_prompt_length_per_row(numbers, wanted):
    *prompts, length, block_size = numbers
    ragged = torch.tensor(prompts)
    assert torch.equal(additive_visibility(ragged, length, block_size) == 0, wanted)
    assert torch.equal(evaluated(flex_visibility(ragged, length, block_size), len(prompts), length), wanted)
    # negative control: one length for all rows passes only where they agree
    one = additive_visibility(prompts[0], length, block_size) == 0
    assert torch.equal(one.expand_as(wanted), wanted) == (len(set(prompts)) == 1)


def test_ragged_flex_tiles_are_those_of_each_row():
    prompts, length, tile = torch.tensor([64, 200]), 384, 128
    dense = flex_visibility(prompts, length, 64).to_dense()[:, 0].bool()
    wanted = (additive_visibility(prompts, length, 64) == 0).view(2, 3, tile, 3, tile).any(dim=4).any(dim=2)
    assert torch.equal(dense, wanted) and not torch.equal(dense[0], dense[1])


@pytest.mark.parametrize(("prompt", "blocks"), [(3, 5), (20, 0), (19, 1), (torch.tensor([16, 3, 9]), 5)])
def test_blocks_are_counted_for_the_longest_answer(prompt, blocks):
    assert block_count(prompt, 20, 4) == blocks == int(block_numbers(prompt, 20, 4).max())
