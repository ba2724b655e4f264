"""Every system by name: which decoder, with which settings. Adding a system is one module and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from backbone.network import FORWARDS, Network
from backbone.settings import build, nearest
from backbone.trace import Trace
from baselines.autoregressive import AutoregressiveDecoder
from baselines.dkv_cache import DKVCacheDecoder, DKVCacheDreamDecoder, DKVCacheDreamSettings, DKVCacheSettings
from baselines.dllm_cache import DLLMCacheDecoder, DLLMCacheDreamDecoder, DLLMCacheDreamSettings, DLLMCacheSettings
from baselines.dream import DreamDecoder, DreamSettings
from baselines.fast_dllm import FastDLLMDecoder, FastDLLMSettings
from baselines.llada import LLaDADecoder, LLaDASettings
from d2f.decoding import D2FDecoder, D2FSettings


class Decoder(Protocol):
    """A policy over which positions to feed, what each may see, and which tokens to commit."""

    def decode(self, prompt: torch.Tensor, max_new_tokens: int) -> Trace: ...


@dataclass(frozen=True)
class NoSettings:
    """Settings of a decoder that has none."""


DECODERS = {
    "autoregressive": (lambda network, settings: AutoregressiveDecoder(network), NoSettings),
    "llada": (LLaDADecoder, LLaDASettings),
    "dream": (DreamDecoder, DreamSettings),
    "fast-dllm": (FastDLLMDecoder, FastDLLMSettings),
    "dkv-cache": (DKVCacheDecoder, DKVCacheSettings),
    "dkv-cache-dream": (DKVCacheDreamDecoder, DKVCacheDreamSettings),
    "dllm-cache": (DLLMCacheDecoder, DLLMCacheSettings),
    "dllm-cache-dream": (DLLMCacheDreamDecoder, DLLMCacheDreamSettings),
    "d2f": (D2FDecoder, D2FSettings),
}


def check_system(decoder: str, settings: Mapping, forward: str) -> None:
    """Refuse an unknown decoder or forward and bad settings, in one line."""
    if decoder not in DECODERS:
        raise ValueError(f"unknown decoder {decoder!r}; {nearest(decoder, DECODERS)}")
    if forward not in FORWARDS:
        raise ValueError(f"unknown forward {forward!r}; {nearest(forward, FORWARDS)}")
    build(DECODERS[decoder][1], settings, "settings")


def make_decoder(decoder: str, settings: Mapping, network: Network) -> Decoder:
    """The decoder of that name on ``network``."""
    check_system(decoder, settings, "lean")
    make, kind = DECODERS[decoder]
    return make(network, build(kind, settings, "settings"))
