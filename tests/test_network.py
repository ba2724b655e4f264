"""The lean forward against transformers' own, over the same parameters, in every way decoders use it."""

from __future__ import annotations

import json

import pytest
import torch

from backbone.network import DESCRIPTION, Network, load_network
from d2f.blocks import additive_visibility
from tests.models import END, MASK, VOCABULARY, module_logits, random_prompt, tiny_module, tiny_network

SHAPES = [
    {"kind": "llama", "kv_heads": 4},
    {"kind": "llama", "kv_heads": 2, "tied": True},
    {"kind": "llama", "kv_heads": 1},
    {"kind": "qwen2", "kv_heads": 4, "tied": True},
    {"kind": "qwen2", "kv_heads": 2},
]
# (name, shift, mask id): LLaDA, Dream, AR
USES = [("llada", False, MASK), ("dream", True, MASK), ("ar", True, None)]
SPREAD = 0.15  # logits of about 1, so that 1e-5 means what it says


def close(first: torch.Tensor, second: torch.Tensor) -> None:
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


def pair(shape: dict, shift: bool, mask_id: int | None) -> list[Network]:
    """Two networks with equal weights: lean, and through the module."""
    options = {**shape, "shift": shift, "mask_id": mask_id, "spread": SPREAD}
    return [tiny_network(forward=name, **options) for name in ("lean", "module")]


def feedings(shift: bool) -> list[tuple]:
    """(fed, ask, see, mask) one after the other into one cache: prefill, scattered, contiguous, single."""
    visibility = additive_visibility(6, 20, 4)
    moved = int(shift)  # with shift a position is predicted by its predecessor, which must have been fed
    return [
        (slice(0, 14), slice(6 + moved, 14 + moved), 14, visibility[:14, :14]),
        (torch.tensor([1, 5, 9, 10]), torch.tensor([5, 10]) + moved, 14, None),
        (slice(10, 20), torch.tensor([11, 13, 19]) + moved, 20, visibility[10:20, :20]),
        (
            torch.tensor([8, 12, 18]),
            slice(12 + moved, 13 + moved),
            16,
            torch.zeros(3, 16).index_fill(1, torch.tensor(3), -1e9),
        ),
        (slice(19, 20), slice(19 + moved, 20 + moved), 20, None),
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "shift", "mask_id"), USES)
def test_lean_equals_module_with_a_cache(shape, name, shift, mask_id):
    lean, module = pair(shape, shift, mask_id)
    caches = [network.cache(1, 21) for network in (lean, module)]
    ids = random_prompt(21, 1)
    for fed, ask, see, mask in feedings(shift):
        first, second = (
            network.predict(ids[None, fed], fed, ask, cache, see, mask)
            for network, cache in zip((lean, module), caches, strict=True)
        )
        close(first, second)
    for ours, theirs in zip(caches[0].states, caches[1].states, strict=True):
        close(ours, theirs)
    assert (lean.forwards, lean.fed) == (module.forwards, module.fed) == (5, 14 + 4 + 10 + 3 + 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("shift", [False, True])
def test_everything_fed_at_once_equals_the_plain_module(shape, shift):
    """Independent of the cache and of ``ModuleForward``: transformers without either."""
    network = tiny_network(shift=shift, spread=SPREAD, **shape)
    ids, mask = random_prompt(17, 2), additive_visibility(5, 17, 4)
    wanted = module_logits(tiny_module(spread=SPREAD, **shape), ids, mask)
    asked = slice(int(shift), 17 + int(shift))
    close(network.predict(ids[None], slice(0, 17), asked, network.cache(1, 17), 17, mask)[0], wanted)


@pytest.mark.parametrize("forward", ["lean", "module"])
def test_feeding_in_pieces_equals_feeding_at_once(forward):
    """Under a causal mask nothing depends on what comes later, so the cache must not show."""
    network = tiny_network("qwen2", shift=True, mask_id=None, forward=forward, spread=SPREAD)
    ids, cache = random_prompt(15, 3), network.cache(1, 15)
    causal = torch.full((15, 15), float("-inf")).triu_(1)
    wanted = module_logits(network.module, ids, causal)
    got = [network.predict(ids[None, :6], slice(0, 6), slice(1, 7), cache, 6, causal[:6, :6])[0]]
    for p in range(6, 15):
        got.append(network.predict(ids[None, p : p + 1], slice(p, p + 1), slice(p + 1, p + 2), cache, p + 1)[0])
    close(torch.cat(got), wanted)


def test_a_shifted_network_predicts_from_rows_fed_earlier():
    """D2F's ``edge``: the first live position is predicted by the last cached one."""
    network = tiny_network(shift=True, spread=SPREAD)
    ids, cache = random_prompt(12, 4), network.cache(1, 12)
    mask = additive_visibility(8, 12, 4)
    wanted = module_logits(network.module, ids, mask)[7]
    network.predict(ids[None, :8], slice(0, 8), slice(8, 9), cache, 8)
    got = network.predict(ids[None, 8:], slice(8, 12), torch.tensor([8, 9]), cache, 12)
    close(got[0, 0], wanted)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4]], ids=str)
def test_fused_parameters_are_the_modules_own(shape):
    network = tiny_network(spread=SPREAD, **shape)
    ids, ask = random_prompt(9, 5), slice(0, 9)

    def logits():
        return network.predict(ids[None], ask, ask, network.cache(1, 9), 9)[0]

    def plain():
        return module_logits(network.module, ids, torch.zeros(9, 9))

    for name, weight in network.module.named_parameters():
        before = logits()
        with torch.no_grad():
            weight.mul_(1.3)
            if weight.ndim == 1:
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
        after = logits()
        assert not torch.equal(before, after), f"{name} has no effect"
        torch.testing.assert_close(after, plain(), atol=1e-4, rtol=1e-4)


def test_rows_are_independent():
    network = tiny_network(spread=SPREAD)
    both = torch.stack([random_prompt(8, 6), random_prompt(8, 7)])
    asked = slice(0, 8)
    together = network.predict(both, asked, asked, network.cache(2, 8), 8)
    for row in range(2):
        close(together[row], network.predict(both[row : row + 1], asked, asked, network.cache(1, 8), 8)[0])


def test_a_context_that_is_too_short_is_refused():
    network = tiny_network(positions=32)
    network.cache(1, 32)
    with pytest.raises(ValueError, match=r"need 33 positions.*context has 32"):
        network.cache(1, 33)


@pytest.mark.parametrize(
    ("given", "named"), [({"mask_id": VOCABULARY}, "mask id 24"), ({"end_ids": (0, -1)}, "end id -1")]
)
def test_ids_outside_the_vocabulary_are_refused(given, named):
    with pytest.raises(ValueError, match=f"{named} is outside the vocabulary of {VOCABULARY}"):
        tiny_network(**given)


def test_unknown_forward_and_activation_are_refused():
    with pytest.raises(ValueError, match="choose one of lean, module"):
        tiny_network(forward="fast")
    module = tiny_module()
    module.config.hidden_act = "gelu"
    with pytest.raises(ValueError, match="'gelu'"):
        Network(module, mask_id=MASK, end_ids=(END,))


def test_a_model_folder_comes_back_as_it_was(tmp_path):
    module = tiny_module("qwen2", tied=True, spread=SPREAD)
    ids, ask = random_prompt(9, 8), slice(0, 9)
    wanted = module_logits(module, ids, torch.zeros(9, 9))
    module.save_pretrained(tmp_path)
    assert load_network(tmp_path).mask_id is None  # a plain Qwen2 is autoregressive
    (tmp_path / DESCRIPTION).write_text(json.dumps({"mask_id": MASK, "end_ids": [END, 7], "shift": False}))
    network = load_network(tmp_path)
    assert (network.mask_id, network.end_ids, network.shift) == (MASK, (END, 7), False)
    close(network.predict(ids[None], ask, ask, network.cache(1, 9), 9)[0], wanted)
    with pytest.raises(ValueError, match="forward is 'quick'"):
        load_network(tmp_path, forward="quick")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPU here"):
            load_network(tmp_path, device="cuda")
