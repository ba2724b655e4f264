"""Recorded generations: every decoder against the tokens and forwards of its public implementation.

A vector file holds ``cases``: a prompt, the reference's settings under its own names, and what came out.
Here its names become ours, once per file; what is not known about a case is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from backbone.network import Network
from harness.systems import make_decoder

GREEDY = {"temperature": 0.0, "top_p": None, "top_k": None, "alg_temp": 0.0}  # what the recorded runs were made with
EXPECTED = {"name", "prompt", "output", "forward_passes", "forward_lengths"}
IGNORED = {  # facts about the reference that follow from the rest, or that only its first release had
    "reported_nfe_first_release", "output_without_cache", "contains_eos", "masks_left",
}  # fmt: skip
FALLBACKS = {"default": "probability", "margin_confidence": "margin", "neg_entropy": "entropy"}


@dataclass(frozen=True)
class Case:
    """One recorded decode, in our names.

    Args:
        name: of the case.
        decoder, settings: see :mod:`harness.systems`.
        prompt: one list of tokens per row.
        length: tokens asked for.
        tokens: the answers, per row.
        forwards, fed: number of forwards and positions fed in each, where they were recorded.
        prepare: a last change to the decoder (recorded randomness).
    """

    name: str
    decoder: str
    settings: dict
    prompt: list[list[int]]
    length: int
    tokens: list[list[int]]
    forwards: int | None = None
    fed: list[int] | None = None
    prepare: Callable | None = None


def reads(case: dict, renamed: dict[str, str], used: set[str]) -> dict:
    """Our settings from a case's; refuses a field that nobody here has heard of, or that is not greedy."""
    for key, wanted in GREEDY.items():
        if case.get(key, wanted) != wanted:
            raise ValueError(f"case {case['name']}: {key} is {case[key]!r}, but recorded runs are greedy ({wanted!r})")
    unknown = set(case) - set(renamed) - used - EXPECTED - IGNORED - set(GREEDY)
    if unknown:
        raise ValueError(f"case {case['name']}: unknown field {', '.join(sorted(unknown))}")
    return {ours: case[theirs] for theirs, ours in renamed.items() if case.get(theirs) is not None}


def make_case(case: dict, decoder: str, settings: dict, length: str, **rest) -> Case:
    """A case whose output starts with its prompt."""
    start = len(case["prompt"][0])
    return Case(
        case["name"], decoder, {**settings, "after_eos": "finish"}, case["prompt"], case[length],
        [row[start:] for row in case["output"]], case.get("forward_passes"), case.get("forward_lengths"), **rest,
    )  # fmt: skip


def llada(case: dict, eot: int | None) -> Case:
    same = ("steps", "block_length", "remasking", "logits_eos_inf", "confidence_eos_eot_inf")
    settings = reads(case, {name: name for name in same} | {"cfg_scale": "guidance"}, {"gen_length"})
    return make_case(case, "llada", settings | {"turn_end_ids": () if eot is None else (eot,)}, "gen_length")


def fast_dllm_llada(case: dict, eot: int | None) -> Case:
    same = ("cache", "block_length", "threshold", "factor")
    settings = reads(case, {name: name for name in same} | {"mode": "rule"}, {"gen_length", "steps"})
    fixed = {"steps": case["steps"]} if case["mode"] == "steps" else {}  # the other rules do not read it
    return make_case(case, "fast-dllm", settings | fixed, "gen_length")


def dkv_decode_llada(case: dict, eot: int | None) -> Case:
    settings = reads(case, {name: name for name in ("steps", "block_length", "refresh_interval")}, {"gen_length"})
    return make_case(case, "dkv-cache", settings, "gen_length")


def dkv_greedy_llada(case: dict, eot: int | None) -> Case:
    renamed = {name: name for name in ("steps", "block_length", "refresh_interval")} | {"window_size": "window"}
    settings = reads(case, renamed, {"gen_length", "denoising_order"}) | {"variant": "greedy"}
    orders = {min(order): order for order in case["denoising_order"]}  # by the block's first position

    def prepare(decoder) -> None:
        decoder.order = lambda canvas, begin, stop: orders[begin]

    return make_case(case, "dkv-cache", settings, "gen_length", prepare=prepare)


def dream(case: dict, eot: int | None) -> Case:
    settings = reads(case, {"steps": "steps", "alg": "algorithm", "eps": "eps"}, {"max_new_tokens", "uniform_draws"})

    def prepare(decoder) -> None:
        draws = iter([number for step in case["uniform_draws"] for number in step])
        decoder.draw = lambda count: torch.tensor([next(draws) for _ in range(count)], dtype=torch.float64)

    return make_case(case, "dream", settings, "max_new_tokens", prepare=prepare if "uniform_draws" in case else None)


def fast_dllm_dream(case: dict, eot: int | None) -> Case:
    same = ("cache", "steps", "threshold", "block_length")
    settings = reads(case, {name: name for name in same}, {"max_new_tokens", "alg", "eps"})
    rule = {"confidence_threshold": "threshold", "entropy": "steps"}[case["alg"]]
    return make_case(case, "fast-dllm", settings | {"rule": rule}, "max_new_tokens")


def dkv_dream(case: dict, eot: int | None) -> Case:
    renamed = {"steps": "steps", "alg": "algorithm", "eps": "eps", "shift_type": "shift_rule"}
    settings = reads(case, renamed, {"max_new_tokens", "cache_type", "refresh_interval"})
    settings["variant"] = {"decoded": "decode", "prefill": "prefill", "pd": "pd"}[case["cache_type"]]
    if case["refresh_interval"]:  # 0 where nothing is refreshed
        settings["refresh_interval"] = case["refresh_interval"]
    return make_case(case, "dkv-cache-dream", settings, "max_new_tokens")


def d2f(case: dict, eot: int | None) -> Case:
    renamed = {
        "block_size": "block_size",
        "block_add_threshold": "tau_add",
        "decoded_token_threshold": "tau_act",
        "skip_threshold": "tau_conf",
    }
    settings = reads(case, renamed, {"max_new_tokens", "sampling_strategy"})
    settings |= {"fallback": FALLBACKS[case["sampling_strategy"]], "after_eos": "finish", "ragged_tail": "floor"}
    return Case(
        case["name"], "d2f", settings, case["prompt"], case["max_new_tokens"], [case["output"]],
        case["forward_passes"], case["forward_lengths"],
    )  # fmt: skip


def dllm_cache(group: dict, shift: bool) -> Iterator[tuple[Case, dict]]:
    """The cases of one group of ``cases.json``, each with its raw form (recorded selections and positions)."""
    base = {"steps": group["steps"], "after_eos": "finish"}
    if shift:
        base |= {"algorithm": group["alg"], "eps": group["eps"], "top_p": group["top_p"], "top_k": group["top_k"]}
    else:
        base |= {key: group[key] for key in ("block_length", "remasking")} | {"guidance": group["cfg_scale"]}
    for case in group["cases"]:
        settings, decoder = dict(base), "dream" if shift else "llada"
        if case["cache"]:
            decoder = "dllm-cache-dream" if shift else "dllm-cache"
            ratio = case["transfer_ratio"]
            settings["transfer_ratio"] = ratio if 0 <= ratio <= 1 else 0.0  # the public code turns others off
            for theirs, ours in (("prompt_interval", "prompt_interval"), ("gen_interval", "response_interval")):
                settings[ours] = max(1, case[theirs])  # -1 is 1 there
            if settings.get("guidance"):
                settings["guidance_interval"] = case["cfg_interval"]
        made = Case(case["id"], decoder, settings, group["prompt"], group["response_length"], case["tokens"])
        yield made, case


def run_case(case: Case, network: Network) -> tuple[list, str]:
    """Decode a case: its traces, and what differs from the record ("" = nothing)."""
    decoder = make_decoder(case.decoder, case.settings, network)
    if case.prepare:
        case.prepare(decoder)
    prompts = torch.tensor(case.prompt)
    traces = (
        decoder.decode_rows(prompts, case.length) if len(prompts) > 1 else [decoder.decode(prompts[0], case.length)]
    )
    steps = traces[0].steps
    if [trace.tokens for trace in traces] != case.tokens:
        return traces, f"{case.name}: other tokens"
    if case.forwards is not None and len(steps) != case.forwards:
        return traces, f"{case.name}: {len(steps)} forwards, not {case.forwards}"
    if case.fed is not None and [step.fed for step in steps] != case.fed:
        return traces, f"{case.name}: fed {[step.fed for step in steps]}, not {case.fed}"
    return traces, ""
