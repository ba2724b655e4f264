"""Original checkpoints in native classes: the reference's own logits, and everything that must be refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backbone.checkpoints import describe, llada_name, load_module
from backbone.network import Network, load_network
from harness.conformance.units import EXACT, compare, every_logit
from tests.models import module_logits, tiny_module

VECTORS = Path(__file__).parent / "data" / "vectors"
KINDS = ("llada", "llada-variant", "dream")


def off(first: torch.Tensor, second: torch.Tensor) -> float:
    return (first - second).abs().max().item()


def copy(kind: str, folder: Path, **changes) -> Path:
    """A writable copy of a vector checkpoint, with other config fields; None removes one."""
    folder.mkdir(exist_ok=True)
    shutil.copyfile(VECTORS / kind / "model.safetensors", folder / "model.safetensors")
    fields = json.loads((VECTORS / kind / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in fields.items() if value is not ...}))
    return folder


def change(folder: Path, edit) -> None:
    """Rewrite the weights of a folder as ``edit`` returns them."""
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.clone() for name, tensor in edit(tensors).items()}, folder / "model.safetensors")


def llada_folder(folder: Path, native: torch.nn.Module, **changes) -> Path:
    """A native Llama written as a LLaDA checkpoint, tensors named by a table written out here."""
    table = {
        "model.embed_tokens": "model.transformer.wte",
        "model.norm": "model.transformer.ln_f",
        "lm_head": "model.transformer.ff_out",
        "model.layers": "model.transformer.blocks",
        "self_attn.o_proj": "attn_out",
        "self_attn.": "",
        "mlp.gate_proj": "ff_proj",
        "mlp.up_proj": "up_proj",
        "mlp.down_proj": "ff_out",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ff_norm",
    }
    tensors = {}
    for name, weight in native.named_parameters():
        for ours, theirs in table.items():
            name = name.replace(ours, theirs)
        if not name.endswith("attn_out.bias"):
            tensors[name] = weight.detach().clone()
    config = native.config
    fields = json.loads((VECTORS / "llada" / "config.json").read_text()) | {
        "d_model": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "mlp_hidden_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "embedding_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "weight_tying": config.tie_word_embeddings,
        "mask_token_id": 1,
        "eos_token_id": 0,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields | changes))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_raw_logits_include_the_padding(kind):
    vectors = load_file(VECTORS / kind / "logits.safetensors")
    with torch.no_grad():
        got = load_module(VECTORS / kind)(
            input_ids=vectors["input_ids"], attention_mask=torch.zeros(1, 1, 40, 40), use_cache=False
        ).logits
    assert compare("logits", got, vectors["logits_float32"], EXACT) is None


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("llada", "blocks.0.ff_proj", "blocks.0.up_proj"),
        ("llada", "blocks.1.attn_norm", "blocks.1.ff_norm"),
        ("llada", "blocks.0.q_proj", "blocks.0.k_proj"),
        ("llada", "transformer.wte", "transformer.ff_out"),
        ("dream", "0.mlp.gate_proj", "0.mlp.up_proj"),
    ],
)
def test_the_comparison_sees_a_wrong_rename(tmp_path, kind, first, second):
    def swap(tensors):
        names = {name.replace(first, "?").replace(second, first).replace("?", second): name for name in tensors}
        return {name: tensors[source] for name, source in names.items()}

    change(copy(kind, tmp_path), swap)
    vectors = load_file(VECTORS / kind / "logits.safetensors")
    assert off(every_logit(load_network(tmp_path), vectors["input_ids"]), vectors["logits_float32"]) > 1


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llada", {"rope_theta": 10000.0}),
        ("llada", {"rms_norm_eps": 1e-2}),
        ("dream", {"rope_theta": 10000.0}),
        ("dream", {"rms_norm_eps": 1e-2}),
        ("dream", {"hidden_act": "gelu"}),
    ],
    ids=str,
)
def test_fields_without_a_shape_are_honoured(tmp_path, kind, changes):
    ids = load_file(VECTORS / kind / "logits.safetensors")["input_ids"]
    before = every_logit(load_network(VECTORS / kind, forward="module"), ids)
    assert off(every_logit(load_network(copy(kind, tmp_path, **changes), forward="module"), ids), before) > 1e-2


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_llada_variants_equal_the_llama_they_were_written_from(tmp_path, kv_heads, tied, biased):
    native = tiny_module(kv_heads=kv_heads, tied=tied, spread=0.15)
    if biased:
        native.config.attention_bias = True
        rebuilt = type(native)(native.config).eval()
        rebuilt.load_state_dict(native.state_dict(), strict=False)
        native = rebuilt
        for name, bias in native.named_parameters():
            if name.endswith("bias"):
                bias.data = torch.zeros_like(bias) if "o_proj" in name else torch.randn(bias.shape)
    heads = {4: {"n_kv_heads": None}, 2: {}, 1: {"n_kv_heads": None, "multi_query_attention": True}}[kv_heads]
    folder = llada_folder(tmp_path, native, include_qkv_bias=biased, **heads)
    ids = torch.arange(2, 20)
    wanted = module_logits(native, ids, torch.zeros(18, 18))
    for forward in ("lean", "module"):
        torch.testing.assert_close(
            every_logit(load_network(folder, forward=forward), ids[None])[0], wanted, atol=1e-5, rtol=1e-5
        )


def test_the_width_of_the_mlp_may_follow_from_its_ratio(tmp_path):
    folder = copy("llada", tmp_path, mlp_hidden_size=None, mlp_ratio=2.5)
    assert load_module(folder).config.intermediate_size == 160


def test_rows_that_pad_the_vocabulary_are_never_predicted(tmp_path):
    def favour(tensors):
        tensors["model.transformer.ff_out.weight"][200:] *= 100
        return tensors

    change(copy("llada-variant", tmp_path), favour)
    ids = load_file(VECTORS / "llada-variant" / "logits.safetensors")["input_ids"]
    for forward in ("lean", "module"):
        network = load_network(tmp_path, forward=forward)
        assert network.module.lm_head.weight.shape[0] == 256
        assert every_logit(network, ids).argmax(-1).max() < 200
    with pytest.raises(ValueError, match="mask id 210 is outside the vocabulary of 200"):
        load_network(copy("llada-variant", tmp_path, mask_token_id=210))


@pytest.mark.parametrize("kind", ["llada-variant", "dream"])
def test_what_is_saved_natively_loads_again(tmp_path, kind):
    """Also the two attributes that a native config has no place for."""
    load_module(VECTORS / kind).save_pretrained(tmp_path)
    ids = load_file(VECTORS / kind / "logits.safetensors")["input_ids"]
    described = describe(VECTORS / kind)
    (tmp_path / "network.json").write_text(json.dumps(described))
    network = load_network(tmp_path)
    assert torch.equal(every_logit(network, ids), every_logit(load_network(VECTORS / kind), ids))
    assert (network.mask_id, list(network.end_ids), network.shift) == tuple(described.values())
    assert getattr(network.module.config, "rope_full_precision", None) == (True if kind == "llada-variant" else None)


def shard(folder: Path) -> None:
    """Two shards and their index in place of the single file."""
    tensors, parts = load_file(folder / "model.safetensors"), {}
    for number, name in enumerate(sorted(tensors)):
        parts.setdefault(f"model-0000{number % 2 + 1}-of-00002.safetensors", {})[name] = tensors[name]
    for part, inside in parts.items():
        save_file(inside, folder / part)
    index = {"weight_map": {name: part for part, inside in parts.items() for name in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("kind", ["llada", "dream"])
def test_shards_equal_the_single_file(tmp_path, kind):
    single = load_module(copy(kind, tmp_path)).state_dict()
    shard(tmp_path)
    sharded = load_module(tmp_path).state_dict()
    assert single.keys() == sharded.keys()
    assert all(torch.equal(single[name], sharded[name]) for name in single)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"00002-of-00002.safetensors is missing"):
        load_module(tmp_path)


def test_loaded_weights_do_not_follow_the_file(tmp_path):
    module = load_module(copy("llada", tmp_path))
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.seek(5000)
        file.write(bytes(400_000))
    assert all(torch.equal(weight, before[name]) for name, weight in module.state_dict().items())


REFUSED = [
    ("llada", {"include_bias": True}, "include_bias is True"),
    ("llada", {"bias_for_layer_norm": True}, "bias_for_layer_norm is True"),
    ("llada", {"scale_logits": True}, "scale_logits is True"),
    ("llada", {"input_emb_norm": True}, "input_emb_norm is True"),
    ("llada", {"attention_layer_norm": True}, "attention_layer_norm is True"),
    ("llada", {"alibi": True}, "alibi is True"),
    ("llada", {"residual_dropout": 0.1}, "residual_dropout is 0.1"),
    ("llada", {"rope": False}, "rope is False: only True"),
    ("llada", {"activation_type": "swiglu"}, "activation_type is 'swiglu': only 'silu'"),
    ("llada", {"activation_type": ...}, "activation_type is None: only 'silu'"),
    ("llada", {"block_type": "sequential"}, "block_type is 'sequential': only 'llama'"),
    ("llada", {"layer_norm_type": "default"}, "layer_norm_type is 'default': only 'rms'"),
    ("llada", {"layer_norm_with_affine": False}, "layer_norm_with_affine is False: only True"),
    ("llada", {"block_group_size": 2}, "block_group_size is 2: only 1"),
    ("llada", {"multi_query_attention": True}, "n_kv_heads 4 contradicts multi_query_attention True"),
    ("llada", {"embedding_size": 128}, "embedding_size 128 is below vocab_size 256"),
    ("llada", {"rope_theta": ..., "n_layers": ...}, "n_layers, rope_theta missing"),
    ("llada", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
    ("llada", {"mask_token_id": ...}, "mask_token_id missing"),
    ("llada", {"mask_token_id": 256}, "mask id 256 is outside the vocabulary of 256"),
    ("dream", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is"),
    ("dream", {"use_sliding_window": True}, "use_sliding_window is True"),
    ("dream", {"use_mrope": True}, "use_mrope is True"),
    ("dream", {"quantization_config": {"bits": 4}}, "quantization_config is"),
    ("dream", {"tie_word_embeddings": True}, r"1 unexpected \(lm_head.weight\)"),
    ("dream", {"hidden_size": ...}, "hidden_size missing"),
    ("dream", {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}, "use_sliding_window is True"),
    ("dream", {"model_type": "qwen2", "quantization_config": {"bits": 4}}, "quantization_config is"),
    (
        "dream",
        {"model_type": "qwen2", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type is 'dynamic'",
    ),
    ("dream", {"model_type": "gpt2"}, "model_type is 'gpt2': choose one of llada, Dream, llama, qwen2"),
]


@pytest.mark.parametrize(("kind", "changes", "said"), REFUSED, ids=[said for _, _, said in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path, kind, changes, said):
    with pytest.raises(ValueError, match=said) as raised:
        load_network(copy(kind, tmp_path, **changes))
    assert "\n" not in str(raised.value)


def drop(name):
    return lambda tensors: {key: value for key, value in tensors.items() if not key.endswith(name)}


MISFITS = [
    (
        "llada",
        lambda tensors: {f"module.{k}": v for k, v in tensors.items()},
        r"21 missing \(.*, \.\.\.\); 21 unexpected",
    ),
    (
        "dream",
        lambda tensors: {k.replace("model.", "net."): v for k, v in tensors.items()},
        "26 missing .* 26 unexpected",
    ),
    ("llada", drop("blocks.1.ff_out.weight"), r"1 missing \(model.transformer.blocks.1.ff_out.weight\)"),
    ("llada", drop("transformer.ff_out.weight"), r"1 missing \(model.transformer.ff_out.weight\)"),
    ("dream", drop("0.self_attn.q_proj.bias"), r"1 missing \(model.layers.0.self_attn.q_proj.bias\)"),
    ("llada", lambda tensors: tensors | {"model.transformer.wpe.weight": torch.zeros(2, 2)}, r"1 unexpected \(.*wpe"),
    (
        "llada",
        lambda tensors: tensors | {"model.transformer.ln_f.weight": torch.zeros(63)},
        r"1 misshapen \(model.transformer.ln_f.weight \[63\] not \[64\]\)",
    ),
]


@pytest.mark.parametrize(("kind", "edit", "said"), MISFITS, ids=[said for _, _, said in MISFITS])
def test_tensors_that_do_not_fit_are_named(tmp_path, kind, edit, said):
    change(copy(kind, tmp_path), edit)
    with pytest.raises(ValueError, match=said) as raised:
        load_module(tmp_path)
    assert "\n" not in str(raised.value)


def test_biases_that_the_config_promises_must_be_there(tmp_path):
    with pytest.raises(ValueError, match=r"6 missing \(model.transformer.blocks.0.k_proj.bias"):
        load_module(copy("llada", tmp_path, include_qkv_bias=True))


def test_only_safetensors_are_read(tmp_path):
    weights = copy("llada", tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        load_module(tmp_path)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor"):
        load_module(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="only pickled weights, which are never read"):
        load_module(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config.json is missing"):
        load_module(tmp_path)


def test_what_an_original_config_says_about_prediction(tmp_path):
    assert describe(VECTORS / "llada") == {"mask_id": 252, "end_ids": [250], "shift": False}
    assert describe(VECTORS / "dream") == {"mask_id": 252, "end_ids": [250], "shift": True}
    folder = copy("dream", tmp_path, model_type="qwen2")
    assert describe(folder) == {"mask_id": None, "end_ids": [250], "shift": True}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [250, 249]}))
    assert describe(folder) == {"mask_id": None, "end_ids": [250, 249], "shift": True}
    assert load_network(folder).end_ids == (250, 249)


def queries(folder: Path, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of layer 0 in bfloat16, (1, 4, Q, d): of the lean forward, and turned by hand in float32."""
    network = load_network(folder, dtype="bfloat16")
    layer, module = network.run.layers[0], network.module
    x = torch.nn.functional.embedding(ids, module.model.embed_tokens.weight)
    got, _ = network.run.project(layer, x, 1, *network.run.rotations(slice(0, len(ids)), len(ids)))
    normed = torch.nn.functional.rms_norm(x, (64,), layer["attention_norm"], module.config.rms_norm_eps)
    q = module.model.layers[0].self_attn.q_proj(normed).view(1, len(ids), 4, -1).transpose(1, 2).float()
    angles = torch.arange(len(ids))[:, None] * module.model.rotary_emb.inv_freq
    cos, sin = angles.cos(), angles.sin()
    first, second = q.chunk(2, -1)
    return got, torch.cat([first * cos - second * sin, second * cos + first * sin], -1).bfloat16()


def test_llada_turns_in_float32_also_in_bfloat16(tmp_path):
    ids = load_file(VECTORS / "llada" / "logits.safetensors")["input_ids"][0]
    got, exact = queries(VECTORS / "llada", ids)
    assert (got == exact).float().mean() > 0.999
    got, exact = queries(copy("llada", tmp_path, rope_full_precision=False), ids)
    assert (got == exact).float().mean() < 0.9
    with pytest.raises(ValueError, match=r"rope_full_precision is on.*use forward: lean"):
        load_network(VECTORS / "llada", dtype="bfloat16", forward="module")
    load_network(tmp_path, dtype="bfloat16", forward="module")


def test_rotary_frequencies_are_never_rounded():
    for kind in KINDS:
        network = load_network(VECTORS / kind, dtype="bfloat16")
        assert network.dtype == torch.bfloat16
        assert network.module.model.rotary_emb.inv_freq.dtype == torch.float32
    with pytest.raises(ValueError, match=r"rotary frequencies are torch.bfloat16"):
        Network(load_module(VECTORS / "dream").bfloat16(), mask_id=252, end_ids=(250,), shift=True)


def test_names_of_the_two_output_matrices_stay_apart():
    assert llada_name("lm_head.weight") == "model.transformer.ff_out.weight"
    assert llada_name("model.layers.11.mlp.down_proj.weight") == "model.transformer.blocks.11.ff_out.weight"
