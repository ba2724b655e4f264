"""Original checkpoints in native transformers classes: a rename, and nothing of theirs is executed.

LLaDA (arXiv:2502.09992) is a Llama without the causal mask and Dream (arXiv:2508.15487) such a Qwen2. Their
weights need other names (LLaDA keeps those of the OLMo code it grew from) and no arithmetic, so the
``modeling_*.py`` that comes with a checkpoint is never needed. That holds only as long as the config asks
for nothing else: every field is used, known to be without effect, or switched off; anything more is refused
by name, because a network that is nearly the right one still answers, only worse.

Two fields have no place in a native config and are kept as extra attributes, which ``save_pretrained`` writes
and reads back: ``rope_full_precision`` (LLaDA turns queries and keys in float32 whatever the dtype; see
:mod:`backbone.inference`) and ``real_vocab_size`` (rows of embedding and head behind it only pad the matrix).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

LLADA_LAYER = {  # native name inside a layer -> original name inside a block
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
LLADA_TOP = {"model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "ff_out"}

# fmt: off
HOUSEKEEPING = {
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "mask_token_id", "model_type", "pad_token_id", "return_dict", "torch_dtype", "transformers_version", "use_cache",
}
DREAM_READ = {
    "attention_dropout", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_theta",
    "tie_word_embeddings", "vocab_size",
}
DREAM_IDLE = {"max_window_layers", "sliding_window"}  # read only under use_sliding_window, which must be off
LLADA_READ = {
    "attention_dropout", "d_model", "embedding_size", "include_qkv_bias", "max_sequence_length", "mlp_hidden_size",
    "mlp_ratio", "multi_query_attention", "n_heads", "n_kv_heads", "n_layers", "rms_norm_eps", "rope_full_precision",
    "rope_theta", "vocab_size", "weight_tying",
}
LLADA_IDLE = {  # how it was initialised or trained, or parts of something that must be off
    "alibi_bias_max", "attention_layer_norm_with_affine", "flash_attention", "init_cutoff_factor", "init_device",
    "init_fn", "init_std", "precision",
}
# fmt: on
LLADA_FIXED = {  # any other value, or the original code's default where the field is absent, is another network
    "activation_type": "silu",
    "block_group_size": 1,
    "block_type": "llama",
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "rope": True,
}


def refuse_unknown(fields: dict, known: set[str], where: Path) -> None:
    """A field that is not known must be off (None, False, zero, empty or "none").

    Raises:
        ValueError: names the first field that is not.
    """
    for name, value in fields.items():
        if name not in known and value and value != "none":
            raise ValueError(f"{where}: {name} is {value!r}, which this loader cannot honour: it must be off or absent")


def required(fields: dict, names: list[str], where: Path) -> list:
    """The values of fields that must be there."""
    absent = [name for name in names if fields.get(name) is None]
    if absent:
        raise ValueError(f"{where}: {', '.join(absent)} missing: take the config.json that came with the weights")
    return [fields[name] for name in names]


def llada_config(fields: dict, where: Path) -> LlamaConfig:
    """The Llama of a LLaDA config."""
    refuse_unknown(fields, HOUSEKEEPING | LLADA_READ | LLADA_IDLE | LLADA_FIXED.keys(), where)
    for name, value in LLADA_FIXED.items():
        if fields.get(name) != value:
            raise ValueError(f"{where}: {name} is {fields.get(name)!r}: only {value!r} is a Llama, others cannot load")
    names = ["d_model", "n_layers", "n_heads", "vocab_size", "max_sequence_length", "rms_norm_eps", "rope_theta"]
    width, layers, heads, vocabulary, positions, epsilon, theta = required(fields, names, where)
    rows = fields.get("embedding_size") or vocabulary
    if rows < vocabulary:
        raise ValueError(f"{where}: embedding_size {rows} is below vocab_size {vocabulary}: some ids have no row")
    return LlamaConfig(
        vocab_size=rows,
        real_vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=fields.get("mlp_hidden_size") or int(required(fields, ["mlp_ratio"], where)[0] * width),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=llada_kv_heads(fields, where),
        max_position_embeddings=positions,
        rms_norm_eps=epsilon,
        rope_theta=theta,
        rope_full_precision=bool(required(fields, ["rope_full_precision"], where)[0]),
        attention_bias=bool(fields.get("include_qkv_bias")),
        attention_dropout=fields.get("attention_dropout") or 0.0,
        tie_word_embeddings=required(fields, ["weight_tying"], where)[0],
        **special_ids(fields),
    )


def llada_kv_heads(fields: dict, where: Path) -> int:
    """Key and value heads: as many as given, else one with multi_query_attention, else one per query head."""
    given, single = fields.get("n_kv_heads"), fields.get("multi_query_attention")
    meant = 1 if single else fields["n_heads"]
    if given and single is not None and given != meant:
        raise ValueError(
            f"{where}: n_kv_heads {given} contradicts multi_query_attention {single}, which means {meant}: correct one"
        )
    return given or meant


def dream_config(fields: dict, where: Path) -> Qwen2Config:
    """The Qwen2 of a Dream config."""
    refuse_unknown(fields, HOUSEKEEPING | DREAM_READ | DREAM_IDLE, where)
    required(fields, sorted(DREAM_READ - {"attention_dropout"}), where)
    read = {name: fields[name] for name in DREAM_READ & fields.keys()}
    return Qwen2Config(**read, use_sliding_window=False, **special_ids(fields))


def special_ids(fields: dict) -> dict:
    """Not the padding id: transformers would keep the gradient from its row, which is also the end token's."""
    return {
        "bos_token_id": fields.get("bos_token_id"),
        "eos_token_id": fields.get("eos_token_id"),
        "pad_token_id": None,
    }


def native_config(fields: dict, where: Path) -> LlamaConfig | Qwen2Config:
    """The config of a plain Llama or Qwen2, whose fields transformers reads itself."""
    config = {"llama": LlamaConfig, "qwen2": Qwen2Config}[fields["model_type"]].from_dict(fields)
    for name in ("quantization_config", "use_sliding_window"):
        if getattr(config, name, None):
            raise ValueError(f"{where}: {name} is {getattr(config, name)!r}: only models without it can be loaded")
    rope = config.rope_parameters["rope_type"]
    if rope in ("dynamic", "longrope"):
        raise ValueError(f"{where}: rope_type is {rope!r}, whose angles depend on the length: it cannot be cached")
    return config


CONFIGS = {"llada": llada_config, "Dream": dream_config, "llama": native_config, "qwen2": native_config}


def read_fields(folder: Path) -> tuple[dict, Path]:
    """The fields of ``config.json`` and its path."""
    where = Path(folder) / "config.json"
    if not where.exists():
        raise FileNotFoundError(f"{where} is missing: {folder} is not a model folder")
    fields = json.loads(where.read_text())
    if fields.get("model_type") not in CONFIGS:
        raise ValueError(f"{where}: model_type is {fields.get('model_type')!r}: choose one of {', '.join(CONFIGS)}")
    return fields, where


def describe(folder: Path) -> dict:
    """What ``network.json`` would hold for an original checkpoint: ``mask_id``, ``end_ids`` and ``shift``.

    LLaDA predicts a position from its own row, Dream and autoregressive models from the row before.
    The end ids of the latter are those of ``generation_config.json`` where there is one: chat models end
    their turns with an id that only stands there.

    Raises:
        ValueError: there is no end id, or a diffusion model without a mask id.
    """
    fields, where = read_fields(folder)
    kind = fields["model_type"]
    if kind in ("llada", "Dream"):
        mask, end = required(fields, ["mask_token_id", "eos_token_id"], where)
        return {"mask_id": mask, "end_ids": [end], "shift": kind == "Dream"}
    generation = Path(folder) / "generation_config.json"
    ends = json.loads(generation.read_text()).get("eos_token_id") if generation.exists() else None
    if ends is None:
        (ends,) = required(fields, ["eos_token_id"], where)
    return {"mask_id": None, "end_ids": ends if isinstance(ends, list) else [ends], "shift": True}


def llada_name(native: str) -> str:
    """LLaDA's name of a tensor of a native Llama: ``lm_head.weight`` -> ``model.transformer.ff_out.weight``."""
    module, _, leaf = native.rpartition(".")
    if not module.startswith("model.layers."):
        return f"model.transformer.{LLADA_TOP[module]}.{leaf}"
    number, inside = module.removeprefix("model.layers.").split(".", 1)
    return f"model.transformer.blocks.{number}.{LLADA_LAYER[inside]}.{leaf}"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder.

    Raises:
        FileNotFoundError: there are none, or the index names one that is not there.
        ValueError: there are only pickled weights.
    """
    folder = Path(folder)
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / INDEX).exists():
        files = [folder / name for name in sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))]
        for path in files:
            if not path.exists():
                raise FileNotFoundError(f"{path} is missing, but {INDEX} names it: download it again")
        return files
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ValueError(f"{folder} has only pickled weights, which are never read: convert them to safetensors first")
    raise FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {INDEX}: download the weights")


def stored(files: list[Path]) -> Iterator[tuple[str, Any]]:
    """Names of the tensors in these files, with a slice that knows its shape and is read by ``[:]``.

    Raises:
        ValueError: a file is not safetensors, or cut short.
    """
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dictionary)
                    yield name, file.get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read as safetensors ({error}): download it again") from error


def refuse_misfits(problems: dict[str, list[str]], where: Path) -> None:
    """Say in one line how many tensors have which problem, and the first of their names.

    Raises:
        ValueError: there are some.
    """
    parts = [
        f"{len(names)} {what} ({', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in problems.items()
        if names
    ]
    if parts:
        raise ValueError(
            f"{where} does not fit its network: {'; '.join(parts)}: take weights and config that belong together"
        )


def fill(module: torch.nn.Module, folder: Path, names: dict[str, str], device: str, dtype: torch.dtype) -> None:
    """Give a module on the meta device the weights of a folder.

    Args:
        names: for every tensor that the files must hold, its name there and its native one; others are zero.

    Raises:
        ValueError: a tensor is missing, unexpected or misshapen.
    """
    files, wanted = weight_files(folder), module.state_dict()
    found = {name: data.get_shape() for name, data in stored(files)}
    shapes = {name: list(wanted[native].shape) for name, native in names.items()}
    both = [name for name in names if name in found]
    problems = {
        "missing": [name for name in names if name not in found],
        "unexpected": [name for name in found if name not in names],
        "misshapen": [f"{name} {found[name]} not {shapes[name]}" for name in both if found[name] != shapes[name]],
    }
    refuse_misfits(problems, folder)
    # copies: views of the file would change with it
    weights = {names[name]: data[:].to(device, dtype, copy=True) for name, data in stored(files)}
    for name in wanted.keys() - weights.keys():
        weights[name] = torch.zeros(wanted[name].shape, device=device, dtype=dtype)
    module.load_state_dict(weights, assign=True)


def load_module(folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A LLaDA, Dream, Llama or Qwen2 folder as ``LlamaForCausalLM`` or ``Qwen2ForCausalLM`` in eval mode.

    Reads ``config.json`` and safetensors, in one file or in shards.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a config field that cannot be honoured, tensors that do not fit, or pickled weights only.
    """
    fields, where = read_fields(folder)
    config = CONFIGS[fields["model_type"]](fields, where)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):  # no time and memory for weights that are replaced
        module = (LlamaForCausalLM if config.model_type == "llama" else Qwen2ForCausalLM)(config)
    module.model.rotary_emb = type(module.model.rotary_emb)(config=config)  # its frequencies stay float32
    rename = llada_name if fields["model_type"] == "llada" else str
    names = {rename(name): name for name in module.state_dict()}
    if config.tie_word_embeddings:
        del names[rename("lm_head.weight")]
    if rename is llada_name:  # has no bias on o, which a native Llama has wherever q, k and v have theirs
        names = {name: native for name, native in names.items() if not native.endswith("o_proj.bias")}
    fill(module, folder, names, device, dtype)
    if config.tie_word_embeddings:
        module.lm_head.weight = module.model.embed_tokens.weight
    return module.to(device).eval()
