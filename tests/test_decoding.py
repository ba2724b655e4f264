"""The D2F decoder against its pseudocode, run slowly and without any cache.

``slow_d2f`` is written from ``spec/d2f.md`` 3.3: it recomputes the whole sequence through transformers'
own forward, under the visibility of section 1, at every pass, and tracks block states by name. It shares
no code with the decoder, and must agree in tokens, number of forwards and positions fed per forward.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import d2f.decoding
from backbone.trace import DONE, FULL, SEMI
from d2f.decoding import D2FDecoder, D2FSettings, Pipeline
from tests.models import MASK, VOCABULARY, module_logits, random_prompt, tiny_module, tiny_network
from tests.test_blocks import slow_visibility

ENDS = (0, 7)
REFERENCE = {"after_eos": "finish", "ragged_tail": "floor"}  # what the authors' code does


def ratio(block: dict) -> float:
    return (block["size"] - block["left"]) / block["size"]


def slow_probabilities(module, x: list[int], visibility: torch.Tensor, shift: bool) -> torch.Tensor:
    """(len(x), V) distributions, row i for position i, MASK impossible."""
    logits = module_logits(module, torch.tensor(x), visibility[: len(x), : len(x)])
    if shift:
        logits = logits.roll(1, dims=0)
    logits = logits.float()
    logits[:, MASK] = float("-inf")
    return torch.softmax(logits, dim=-1)


def slow_write(x: list[int], block: dict, p: torch.Tensor, tau_conf: float) -> list[int]:
    """Step E for one block: write its chosen tokens into ``x`` and return them."""
    masked = [i for i in range(block["start"], block["start"] + block["size"]) if x[i] == MASK]
    best = {i: (float(p[i].max()), int(p[i].argmax())) for i in masked}
    chosen = [i for i in masked if best[i][0] > tau_conf]
    if not chosen and block["full"]:
        chosen = [max(masked, key=lambda i: best[i][0])]
    for i in chosen:
        x[i] = best[i][1]
    block["left"] -= len(chosen)
    return [x[i] for i in chosen]


def slow_d2f(module, prompt: list[int], max_new: int, s: D2FSettings, shift: bool) -> tuple[list[int], list[int]]:
    """The pseudocode; returns the answer and the number of positions fed in each pass."""
    x, fed, cached, eos_seen = list(prompt), [], 0, False
    blocks = [{"start": 0, "size": len(prompt), "left": 0, "full": True, "state": "to_cache"}]
    limit = max_new // s.block_size
    blocked = slow_visibility(len(prompt), len(prompt) + max_new, s.block_size)
    visibility = torch.tensor(blocked).logical_not() * torch.finfo(torch.float32).min
    while True:
        if len(blocks) - 1 < limit and not eos_seen and ratio(blocks[-1]) >= s.tau_add:  # A
            blocks.append(
                {"start": len(x), "size": s.block_size, "left": s.block_size, "full": False, "state": "active"}
            )
            x += [MASK] * s.block_size
        for block, following in itertools.pairwise(blocks):  # B
            if ratio(block) >= s.tau_act:
                following["full"] = True
        active = [block for block in blocks if block["state"] == "active"]
        if not active and MASK not in x:  # C
            return x[len(prompt) :], fed
        waiting = [block for block in blocks if block["state"] == "to_cache"]  # D
        assert (waiting or active)[0]["start"] == cached
        p = slow_probabilities(module, x, visibility, shift)
        fed.append(len(x) - cached)
        cached += sum(block["size"] for block in waiting)
        for block in waiting:
            block["state"] = "in_cache"
        for block in active:  # E
            if block["left"]:
                eos_seen |= any(token in ENDS for token in slow_write(x, block, p, s.tau_conf))
        for block in active:  # F
            if block["left"]:
                break
            block["state"] = "to_cache"


def random_case(seed: int) -> dict:
    """A small random model, prompt and setting."""
    rng = random.Random(seed)
    model = {
        "kind": rng.choice(["llama", "qwen2"]),
        "seed": seed % 11,
        "kv_heads": rng.choice([1, 2, 4]),
        "spread": rng.choice([0.2, 0.35, 0.5]),
    }
    settings = {
        "block_size": rng.randint(1, 8),
        "tau_add": rng.choice([0.0, 0.1, 0.3, 0.7, 1.0]),
        "tau_act": rng.choice([0.0, 0.3, 0.6, 0.95, 1.0]),
        "tau_conf": rng.choice([0.0, 0.2, 0.35, 0.5, 0.8, 1.0]),
    }
    return {
        "model": model,
        "settings": settings,
        "shift": rng.random() < 0.4,
        "prompt": random_prompt(rng.randint(1, 12), seed),
        "max_new": rng.randint(1, 28),
    }


def decode(case: dict, **changes):
    """The trace of a random case; ``changes`` replace settings."""
    network = tiny_network(shift=case["shift"], end_ids=changes.pop("end_ids", ENDS), **case["model"])
    return D2FDecoder(network, D2FSettings(**{**case["settings"], **changes})).decode(case["prompt"], case["max_new"])


def agrees(case: dict) -> bool:
    """Whether decoder and pseudocode give the same tokens, forwards and fed lengths."""
    settings = D2FSettings(**case["settings"], **REFERENCE)
    module = tiny_module(**case["model"])
    answer, fed = slow_d2f(module, case["prompt"].tolist(), case["max_new"], settings, case["shift"])
    trace = decode(case, **REFERENCE)
    return (trace.tokens, [step.fed for step in trace.steps]) == (answer, fed)


@pytest.mark.parametrize("first", range(0, 300, 20))
def test_decoder_equals_the_uncached_pseudocode(first):
    assert [seed for seed in range(first, first + 20) if not agrees(random_case(seed))] == []


class StalePipeline(Pipeline):
    """The mistake the exact cache avoids: keep the states of the pass that decoded a block's last token."""

    def commit(self, positions, tokens):
        super().commit(positions, tokens)
        while len(self.live) > 1 and not self.live[0].masked:
            self.live[1].full = True
            self.cached = self.live.pop(0).stop


def test_a_stale_cache_is_noticed(monkeypatch):
    monkeypatch.setattr(d2f.decoding, "Pipeline", StalePipeline)
    settings = D2FSettings(block_size=4, tau_add=0.25, tau_conf=0.35, **REFERENCE)
    differs = 0
    for seed in range(6):
        case = {"model": {"seed": seed}, "shift": False, "prompt": random_prompt(6, seed), "max_new": 24}
        trace = D2FDecoder(tiny_network(end_ids=(), **case["model"]), settings).decode(case["prompt"], case["max_new"])
        with monkeypatch.context() as exact:
            exact.setattr(d2f.decoding, "Pipeline", Pipeline)
            wanted = D2FDecoder(tiny_network(end_ids=(), **case["model"]), settings).decode(
                case["prompt"], case["max_new"]
            )
        differs += trace.tokens != wanted.tokens
    assert differs


def test_the_random_cases_reach_the_hard_parts():
    """Else agreement would mean little: pipelining, end tokens, semi-activation, several tokens a pass."""
    traces = [decode(random_case(seed), **REFERENCE) for seed in range(100)]
    steps = [step for trace in traces for step in trace.steps]
    states = {state for step in steps for _, state in step.blocks}
    assert states == {SEMI, FULL, DONE}
    assert sum(len(step.blocks) > 2 for step in steps) > 20
    assert sum(len(step.positions) > 1 for step in steps) > 20
    assert sum(any(end in trace.tokens for end in ENDS) for trace in traces) > 10


def test_stop_is_finish_cut_at_the_first_end_token():
    shorter = 0
    for seed in range(200, 260):
        case = random_case(seed)
        stop, finish = decode(case, after_eos="stop"), decode(case, after_eos="finish")
        ends = [i for i, token in enumerate(finish.tokens) if token in ENDS]
        assert stop.tokens == finish.tokens[: ends[0] + 1 if ends else None]
        for early, late in zip(stop.steps, finish.steps, strict=False):
            assert (early.fed, early.positions, early.tokens) == (late.fed, late.positions, late.tokens)
        assert len(stop.steps) <= len(finish.steps)
        shorter += len(stop.steps) < len(finish.steps)
    assert shorter > 3


@pytest.mark.parametrize("seed", range(300, 312))
def test_ragged_tail_emits_exactly_what_was_asked(seed):
    case = random_case(seed)
    size, wanted = case["settings"]["block_size"], case["max_new"]
    emitted = decode(case, ragged_tail="emit", end_ids=())
    assert len(emitted.tokens) == wanted
    assert len(decode(case, ragged_tail="floor", end_ids=()).tokens) == wanted - wanted % size
    committed = sorted(position for step in emitted.steps for position in step.positions)
    assert committed == list(range(len(case["prompt"]), len(case["prompt"]) + wanted))  # each position once


@pytest.mark.parametrize("seed", range(320, 326))
def test_serial_thresholds_commit_one_token_per_forward(seed):
    trace = decode(random_case(seed), tau_add=1.0, tau_conf=1.0, end_ids=())
    assert all(len(step.positions) == 1 for step in trace.steps)
    assert len(trace.steps) == len(trace.tokens)
    assert all(sum(state != DONE for _, state in step.blocks) == 1 for step in trace.steps)


@pytest.mark.parametrize("seed", range(330, 336))
def test_lowest_confidence_threshold_commits_everything_at_once(seed):
    case = random_case(seed)
    trace = decode(case, tau_conf=0.0, tau_add=1.0, end_ids=())
    assert len(trace.steps) == -(-case["max_new"] // case["settings"]["block_size"])


def test_mask_is_never_emitted_by_a_model_that_loves_it():
    network = tiny_network(end_ids=())
    predict = network.predict

    def in_love(*inputs):
        logits = predict(*inputs)
        logits[..., MASK] += 1000.0
        assert (logits.argmax(-1) == MASK).all()  # what a decoder without the rule would write
        return logits

    network.predict = in_love
    trace = D2FDecoder(network, D2FSettings(block_size=4)).decode(random_prompt(5, 0), 14)
    assert len(trace.tokens) == 14 and MASK not in trace.tokens


@pytest.mark.parametrize("shift", [False, True])
def test_both_forwards_decode_alike(shift):
    for seed in range(4):
        decoders = [
            D2FDecoder(tiny_network(seed=seed, shift=shift, forward=name), D2FSettings(block_size=5, tau_conf=0.4))
            for name in ("lean", "module")
        ]
        first, second = (decoder.decode(random_prompt(7, seed), 23) for decoder in decoders)
        assert first.tokens == second.tokens


def test_watch_sees_every_step():
    seen = []
    network = tiny_network(end_ids=())
    decoder = D2FDecoder(network, D2FSettings(block_size=4), lambda answer, blocks: seen.append((list(answer), blocks)))
    trace = decoder.decode(random_prompt(5, 0), 12)
    assert len(seen) == len(trace.steps) == network.forwards
    assert [blocks for _, blocks in seen] == [step.blocks for step in trace.steps]
    assert seen[-1][0] == trace.tokens
    assert sum(step.fed for step in trace.steps) == network.fed
    assert [step.prefill for step in trace.steps] == [True] + [False] * (len(trace.steps) - 1)


@pytest.mark.parametrize(
    ("prompt", "max_new", "message"),
    [
        ([], 8, "at least one token"),
        ([5, MASK, 6], 8, "mask id"),
        ([5, 6], 0, "max_new_tokens is 0"),
        ([5] * 90, 8, "context has 96"),
    ],
)
def test_bad_requests_are_refused(prompt, max_new, message):
    decoder = D2FDecoder(tiny_network(), D2FSettings())
    with pytest.raises(ValueError, match=message):
        decoder.decode(torch.tensor(prompt, dtype=torch.int64), max_new)


@pytest.mark.parametrize(
    "wrong",
    [{"block_size": 0}, {"tau_add": -0.1}, {"tau_act": 1.1}, {"tau_conf": float("nan")}, {"after_eos": "go"},
     {"ragged_tail": "cut"}],
)  # fmt: skip
def test_bad_settings_are_refused_with_their_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        D2FSettings(**wrong)


def test_an_autoregressive_network_is_refused():
    with pytest.raises(ValueError, match="no mask id"):
        D2FDecoder(tiny_network(mask_id=None, shift=True), D2FSettings())


def test_answers_stay_in_the_vocabulary_and_a_short_floor_is_empty():
    trace = decode(random_case(0), ragged_tail="floor", block_size=29)
    assert trace.tokens == [] and trace.steps == []
    assert all(0 <= token < VOCABULARY for token in decode(random_case(1)).tokens)
