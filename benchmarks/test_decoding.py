"""Benchmarks of decoding: `make bench`. Times are printed and kept, never asserted.

What is measured: one forward against the number of live positions and against the context's length; a step of
each system against its bare forward, as the share of time spent outside the network; the AR twin against
transformers' own ``generate``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backbone.network import load_network
from harness.systems import make_decoder

MODELS = Path("models/laptop")
SYSTEMS = {
    "ar": ("autoregressive", "ar", {}),
    "vanilla": ("llada", "teacher", {}),
    "fast-dllm-prefix": ("fast-dllm", "teacher", {"cache": "prefix"}),
    "fast-dllm-dual": ("fast-dllm", "teacher", {"cache": "dual"}),
    "d2f": ("d2f", "teacher", {"block_size": 16}),
}
PROMPT = (
    "mia has 9 books . mia gives 4 books to sam . leo has 7 pens . mia finds 5 more books . mia sells 2 books . "
    "mia gets 3 bags with 2 books each . how many books does mia have now ? |"
)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def prompt_ids(model: str) -> torch.Tensor:
    from harness.train import load_tokenizer

    return torch.tensor(load_tokenizer(MODELS / model)(PROMPT)["input_ids"])


@pytest.mark.parametrize("forward", ["lean", "module"])
@pytest.mark.parametrize("live", [1, 4, 8, 16, 32, 64, 128])
def test_forward_by_live_positions(benchmark, live, forward):
    network = load_network(MODELS / "teacher", forward=forward)
    cache, fed = network.cache(1, 256), slice(64, 64 + live)
    ids = torch.zeros(1, live, dtype=torch.long)
    with torch.inference_mode():
        benchmark(lambda: network.predict(ids, fed, fed, cache, fed.stop))
    benchmark.extra_info["live"] = live


@pytest.mark.parametrize("context", [64, 128, 256, 480])
def test_forward_by_context(benchmark, context):
    network = load_network(MODELS / "teacher")
    cache, fed = network.cache(1, 512), slice(context, context + 16)
    ids = torch.zeros(1, 16, dtype=torch.long)
    with torch.inference_mode():
        benchmark(lambda: network.predict(ids, fed, fed, cache, fed.stop))
    benchmark.extra_info["context"] = context


@pytest.mark.parametrize("name", SYSTEMS)
def test_step_against_bare_forward(benchmark, name):
    decoder, model, settings = SYSTEMS[name]
    network = load_network(MODELS / model)
    network.profile = True
    system, prompt = make_decoder(decoder, settings, network), prompt_ids(model)
    seconds = forwards = 0.0

    def decode():
        nonlocal seconds, forwards
        trace = system.decode(prompt, 128)
        seconds += trace.seconds
        forwards += len(trace.steps)

    benchmark.pedantic(decode, rounds=5, warmup_rounds=0)
    outside = 1 - network.seconds / seconds
    benchmark.extra_info.update(
        milliseconds_per_step=1e3 * seconds / forwards,
        milliseconds_per_forward=1e3 * network.seconds / forwards,
        share_outside_the_forward=outside,
    )
    print(f"\n{name}: {1e3 * seconds / forwards:.3f} ms a step, {outside:.1%} of it outside the network's forward")


@pytest.mark.parametrize("engine", ["lean", "module", "transformers-generate"])
def test_autoregressive_engines(benchmark, engine):
    prompt = prompt_ids("ar")
    network = load_network(MODELS / "ar", forward="module" if engine == "module" else "lean")
    if engine != "transformers-generate":
        system = make_decoder("autoregressive", {}, network)
        tokens = benchmark(lambda: system.decode(prompt, 128).tokens)
    else:
        options = {"max_new_tokens": 128, "do_sample": False, "pad_token_id": network.end_ids[0]}
        ids = prompt[None]
        with torch.inference_mode():
            tokens = benchmark(
                lambda: network.module.generate(ids, attention_mask=torch.ones_like(ids), use_cache=True, **options)
            )[0, len(prompt) :].tolist()
    benchmark.extra_info["tokens"] = len(tokens)
