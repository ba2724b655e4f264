"""The block-causal visibility against nested loops written from its definition."""

from __future__ import annotations

import random

import pytest
import torch

from d2f.blocks import additive_visibility, block_numbers, flex_visibility, visible


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
