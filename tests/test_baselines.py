"""Every baseline against a slow, obvious version through transformers' own forward.

The slow versions keep explicit copies of the keys and values of the positions that a policy freezes, in
transformers' cache, and recompute the rest; they share no code with ``Canvas`` or ``SlotCache``.
"""

from __future__ import annotations

import random

import pytest
import torch
from transformers import DynamicCache

from baselines.autoregressive import AutoregressiveDecoder
from baselines.fast_dllm import CACHES, FastDLLMDecoder, FastDLLMSettings
from baselines.llada import LLaDADecoder, LLaDASettings
from tests.models import MASK, random_prompt, tiny_module, tiny_network

ENDS = (0, 7)


def slow_forward(
    module, ids: list[int], positions: list[int], frozen: DynamicCache
) -> tuple[torch.Tensor, DynamicCache]:
    """Logits (Q, V) of the fed positions, which see everything frozen and each other."""
    seen = len(ids) + (frozen.layers[0].keys.shape[2] if frozen.layers else 0)
    with torch.no_grad():
        output = module.model(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor([positions]),
            attention_mask=torch.zeros(1, 1, len(ids), seen),
            cache=frozen,
            use_cache=True,
        )
        return module.lm_head(output.last_hidden_state)[0], frozen


def frozen_copy(full: list[tuple[torch.Tensor, torch.Tensor]], positions: list[int]) -> DynamicCache:
    """A cache that holds copies of the states of ``positions`` only."""
    held = DynamicCache()
    for layer, (keys, values) in enumerate(full):
        held.update(keys[:, :, positions].clone(), values[:, :, positions].clone(), layer)
    return held


def slow_choices(logits: torch.Tensor) -> tuple[list[float], list[int]]:
    """Confidence and token of each row, MASK impossible."""
    logits = logits.clone()
    logits[:, MASK] = float("-inf")
    best = torch.softmax(logits, dim=-1).max(dim=-1)
    return best.values.tolist(), best.indices.tolist()


def slow_llada(module, prompt: list[int], length: int, steps: int, block: int, shift: int) -> list[int]:
    x, start = prompt + [MASK] * length, len(prompt)
    per_block = steps // (length // block)
    for begin in range(start, start + length, block):
        for step in range(per_block):
            count = block // per_block + (step < block % per_block)
            logits, _ = slow_forward(module, x, list(range(len(x))), DynamicCache())
            confidences, tokens = slow_choices(logits.roll(shift, dims=0))
            masked = [i for i in range(begin, begin + block) if x[i] == MASK]
            for i in sorted(masked, key=lambda i: (-confidences[i], i))[:count]:
                x[i] = tokens[i]
    return x[start:]


def slow_fast_dllm(
    module, prompt: list[int], length: int, block: int, s: FastDLLMSettings
) -> tuple[list[int], list[int]]:
    """Answer and number of positions fed in each pass, for LLaDA (Dream's rules: the reference vectors)."""
    x, start, end, fed_lengths = prompt + [MASK] * length, len(prompt), len(prompt) + length, []
    for begin in range(start, end, block):
        stop = min(begin + block, end)
        whole = list(range(end))
        later = {"none": whole, "prefix": list(range(begin, end)), "dual": list(range(begin, stop))}[s.cache]
        full, rows, fed = [], torch.zeros(end, module.config.vocab_size), whole
        while masked := [i for i in range(begin, stop) if x[i] == MASK]:
            frozen = (
                frozen_copy(full, [i for i in whole if i not in fed]) if full and len(fed) < end else DynamicCache()
            )
            rows[fed], states = slow_forward(module, [x[i] for i in fed], fed, frozen)
            fed_lengths.append(len(fed))
            if not full:
                full = [(layer.keys, layer.values) for layer in states.layers]
            confidences, tokens = slow_choices(rows[masked])
            best = confidences.index(max(confidences))
            for n, i in enumerate(masked):
                if n == best or confidences[n] >= s.threshold:
                    x[i] = tokens[n]
            fed = later
    return x[start:], fed_lengths


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def random_model(rng: random.Random) -> dict:
    return {"kind": rng.choice(["llama", "qwen2"]), "seed": rng.randrange(9), "kv_heads": rng.choice([1, 2, 4])}


def cut(tokens: list[int]) -> list[int]:
    """Up to and including the first end token."""
    ends = [i for i, token in enumerate(tokens) if token in ENDS]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.parametrize("seed", range(10))
def test_llada_equals_the_slow_sampler(seed):
    rng = random.Random(seed)
    model, length = random_model(rng), rng.choice([4, 6, 8, 12])
    block = rng.choice(divisors(length))
    steps = (length // block) * rng.randint(1, block)
    prompt, shift = random_prompt(rng.randint(1, 9), seed), rng.random() < 0.3
    decoder = LLaDADecoder(
        tiny_network(shift=shift, end_ids=ENDS, **model), LLaDASettings(steps, block, after_eos="finish")
    )
    trace = decoder.decode(prompt, length)
    assert trace.tokens == slow_llada(tiny_module(**model), prompt.tolist(), length, steps, block, int(shift))
    assert len(trace.steps) == steps
    assert {step.fed for step in trace.steps} == {len(prompt) + length}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("seed", range(8))
def test_fast_dllm_equals_the_slow_version(cache, seed):
    rng = random.Random(seed)
    model, length, block = random_model(rng), rng.randint(3, 18), rng.randint(1, 7)
    settings = FastDLLMSettings(cache, block, threshold=rng.choice([0.2, 0.35, 0.6, 1.0]), after_eos="finish")
    prompt = random_prompt(rng.randint(1, 9), seed)
    trace = FastDLLMDecoder(tiny_network(end_ids=ENDS, **model), settings).decode(prompt, length)
    answer, fed = slow_fast_dllm(tiny_module(**model), prompt.tolist(), length, block, settings)
    assert trace.tokens == answer
    assert [step.fed for step in trace.steps] == fed


def test_the_three_caches_are_three_algorithms():
    """Negative control: were the caches exact, the comparison above could not tell them apart."""
    answers = {cache: [] for cache in CACHES}
    for seed in range(6):
        for cache in CACHES:
            settings = FastDLLMSettings(cache, 5, threshold=0.6, after_eos="finish")
            answers[cache] += (
                FastDLLMDecoder(tiny_network(seed=seed), settings).decode(random_prompt(6, seed), 15).tokens
            )
    assert len({tuple(tokens) for tokens in answers.values()}) == 3


@pytest.mark.parametrize("name", ["llada", *CACHES])
def test_stop_is_finish_cut_at_the_first_end_token(name):
    shorter = 0
    for seed in range(8):
        network, prompt = tiny_network(seed=seed, end_ids=ENDS), random_prompt(5, seed)
        traces = {}
        for rule in ("stop", "finish"):
            if name == "llada":
                decoder = LLaDADecoder(network, LLaDASettings(0, 4, after_eos=rule))
            else:
                decoder = FastDLLMDecoder(network, FastDLLMSettings(name, 4, after_eos=rule))
            traces[rule] = decoder.decode(prompt, 16)
        assert len(traces["finish"].tokens) == 16
        assert traces["stop"].tokens == cut(traces["finish"].tokens)
        assert len(traces["stop"].steps) <= len(traces["finish"].steps)
        shorter += len(traces["stop"].steps) < len(traces["finish"].steps)
    assert shorter


@pytest.mark.parametrize("decoder", ["llada", "fast-dllm"])
def test_mask_is_never_emitted(decoder):
    network = tiny_network(end_ids=())
    predict = network.predict

    def in_love(*inputs):
        logits = predict(*inputs)
        logits[..., MASK] += 1000.0
        return logits

    network.predict = in_love
    made = (
        LLaDADecoder(network, LLaDASettings(0, 4))
        if decoder == "llada"
        else FastDLLMDecoder(network, FastDLLMSettings())
    )
    tokens = made.decode(random_prompt(4, 0), 12).tokens
    assert len(tokens) == 12 and MASK not in tokens


@pytest.mark.parametrize("seed", range(8))
def test_autoregression_equals_transformers_generate(seed):
    rng = random.Random(seed)
    model, prompt, length = random_model(rng), random_prompt(rng.randint(1, 9), seed), rng.randint(1, 24)
    network = tiny_network(shift=True, mask_id=None, end_ids=ENDS, **model)
    trace = AutoregressiveDecoder(network).decode(prompt, length)
    reference = tiny_module(**model).generate(
        prompt[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=length,
        eos_token_id=list(ENDS),
        pad_token_id=0,
    )
    assert trace.tokens == reference[0, len(prompt) :].tolist()
    assert [step.fed for step in trace.steps] == [len(prompt)] + [1] * (len(trace.tokens) - 1)
    assert [step.context for step in trace.steps] == list(range(len(prompt), len(prompt) + len(trace.tokens)))


def test_requests_that_cannot_be_decoded_are_refused():
    network, prompt = tiny_network(), random_prompt(4, 0)
    with pytest.raises(ValueError, match="not a multiple of block_length 5"):
        LLaDADecoder(network, LLaDASettings(0, 5)).decode(prompt, 12)
    with pytest.raises(ValueError, match="steps 4 is not a multiple of the 3 blocks"):
        LLaDADecoder(network, LLaDASettings(4, 4)).decode(prompt, 12)
    for decoder in (LLaDADecoder(network, LLaDASettings(0, 4)), FastDLLMDecoder(network, FastDLLMSettings())):
        for wrong, length in [(prompt[:0], 8), (torch.tensor([5, MASK]), 8), (prompt, 0), (prompt, 96)]:
            with pytest.raises(ValueError, match=r"prompt|max_new_tokens"):
                decoder.decode(wrong, length)


def test_a_network_of_the_wrong_kind_is_refused():
    with pytest.raises(ValueError, match="shift: true"):
        AutoregressiveDecoder(tiny_network())
    with pytest.raises(ValueError, match="no mask id"):
        FastDLLMDecoder(tiny_network(mask_id=None, shift=True), FastDLLMSettings()).decode(random_prompt(4, 0), 8)


@pytest.mark.parametrize("wrong", [{"cache": "both"}, {"block_length": 0}, {"threshold": 1.5}, {"after_eos": "go"}])
def test_bad_fast_dllm_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FastDLLMSettings(**wrong)


@pytest.mark.parametrize("wrong", [{"steps": -1}, {"block_length": 0}, {"after_eos": "go"}])
def test_bad_llada_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LLaDASettings(**wrong)
