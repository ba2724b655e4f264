"""LoRA adapters: the reference student's own logits, undone to the bit, and no adapter that does nothing."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from backbone.adapters import load_adapter
from backbone.checkpoints import load_module
from backbone.network import Network, load_network
from d2f.blocks import additive_visibility
from tests.models import module_logits, tiny_module

VECTORS = Path(__file__).parent / "data" / "vectors"
KINDS = ("llada", "dream")


def logits(network: Network, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """(L, V) logits of one row, unshifted."""
    asked = slice(int(network.shift), len(ids) + int(network.shift))
    return network.predict(ids[None], slice(0, len(ids)), asked, network.cache(1, len(ids)), len(ids), mask)[0]


def worst(network: Network, kind: str, whose: str = "student") -> float:
    """The largest difference to the logits of the reference's student or teacher, over all training vectors."""
    tensors, differences = load_file(VECTORS / kind / "d2f-train.safetensors"), []
    for case in json.loads((VECTORS / kind / "d2f-train.json").read_text())["cases"]:
        ids, wanted = tensors[f"{case['case']}.noisy_ids"], tensors[f"{case['case']}.{whose}_logits"]
        for row, prompt in enumerate(case["prompt_lengths"]):
            mask = additive_visibility(prompt, ids.shape[1], case["block_size"]) if whose == "student" else None
            differences.append((logits(network, ids[row], mask) - wanted[row]).abs().max().item())
    return max(differences)


def copy(kind: str, folder: Path, edit=None, **changes) -> Path:
    """A copy of a vector adapter with other config fields and tensors."""
    shutil.copytree(VECTORS / kind / "lora", folder, dirs_exist_ok=True)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    if edit:
        tensors = load_file(folder / "adapter_model.safetensors")
        save_file({k: v.clone() for k, v in edit(tensors).items()}, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("forward", ["lean", "module"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_student_is_the_references(kind, forward):
    network = load_network(VECTORS / kind, adapter=VECTORS / kind / "lora", forward=forward)
    assert worst(network, kind) < 1e-4
    assert worst(network, kind, "teacher") > 1


@pytest.mark.parametrize("forward", ["lean", "module"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_network_sees_its_module_merged_and_unmerged(kind, forward):
    """The lean forward reads fused matrices: the merge must reach them."""
    network = load_network(VECTORS / kind, forward=forward)
    assert worst(network, kind, "teacher") < 1e-4
    before = {name: weight.clone() for name, weight in network.module.state_dict().items()}
    adapter = load_adapter(VECTORS / kind / "lora")
    adapter.merge(network.module)
    assert worst(network, kind) < 1e-4
    changed = [name for name, weight in network.module.state_dict().items() if not torch.equal(weight, before[name])]
    assert len(changed) == len(adapter.pairs) == 8
    with pytest.raises(ValueError, match="merged already"):
        adapter.merge(network.module)
    adapter.unmerge()
    assert all(torch.equal(weight, before[name]) for name, weight in network.module.state_dict().items())
    assert worst(network, kind, "teacher") < 1e-4
    with pytest.raises(ValueError, match="not merged"):
        adapter.unmerge()


def test_the_sum_is_rounded_once_in_bfloat16():
    plain, module = (load_module(VECTORS / "llada", dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    before = module.model.layers[1].self_attn.o_proj.weight.clone()
    adapter = load_adapter(VECTORS / "llada" / "lora")
    adapter.merge(module)
    a, b = adapter.pairs["model.transformer.blocks.1.attn_out"]
    wanted = plain.model.layers[1].self_attn.o_proj.weight.bfloat16().float() + 2.0 * (b @ a)
    assert torch.equal(module.model.layers[1].self_attn.o_proj.weight, wanted.bfloat16())
    adapter.unmerge()
    assert torch.equal(module.model.layers[1].self_attn.o_proj.weight, before)


@pytest.mark.parametrize("changes", [{"lora_alpha": 4}, {"use_rslora": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_comparison_sees_a_wrong_scale(tmp_path, kind, changes):
    assert worst(load_network(VECTORS / kind, adapter=copy(kind, tmp_path, **changes)), kind) > 0.1


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_an_adapter_saved_by_peft_on_a_native_model(tmp_path, kind, rslora):
    ids, mask = torch.arange(2, 20), torch.zeros(18, 18)
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "down_proj"], use_rslora=rslora, init_lora_weights=False
    )
    torch.manual_seed(0)
    adapted = peft.get_peft_model(tiny_module(kind, spread=0.15), config).eval()
    adapted.save_pretrained(tmp_path)
    wanted = module_logits(adapted, ids, mask)
    module, adapter = tiny_module(kind, spread=0.15), load_adapter(tmp_path)
    assert adapter.scale == (5 / math.sqrt(3) if rslora else 5 / 3)
    assert not torch.allclose(module_logits(module, ids, mask), wanted, atol=1e-2)
    adapter.merge(module)
    torch.testing.assert_close(module_logits(module, ids, mask), wanted, atol=1e-5, rtol=1e-5)


def renamed(old: str, new: str):
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def put(ending: str, value):
    """Replace the first tensor whose name ends so."""

    def edit(tensors):
        name = next(name for name in sorted(tensors) if name.endswith(ending))
        return tensors | {name: value(tensors[name])}

    return edit


def without(part: str):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


FAULTS = [
    (renamed("base_model.model.", ""), {}, "16 tensors not named"),
    (renamed("lora_A.", "lora_A.default."), {}, "8 tensors not named"),
    (renamed("blocks", "layers"), {}, "8 targeted matrices without tensors .* 8 tensors without a targeted matrix"),
    (renamed("transformer.blocks", "layers"), {}, "tensors without a targeted matrix"),
    (renamed("blocks.1", "blocks.7"), {}, "4 targeted matrices without tensors .* 4 tensors without"),
    (without("blocks.1.q_proj"), {}, r"1 targeted matrices without tensors \(model.transformer.blocks.1.q_proj\)"),
    (None, {"target_modules": ["q_proj", "v_proj"]}, "4 tensors without a targeted matrix"),
    (None, {"target_modules": ["q_proj", "k_proj", "v_proj", "attn_out", "up_proj"]}, "2 targeted matrices without"),
    (without("blocks.0.q_proj.lora_A"), {}, r"1 A without B or B without A \(model.transformer.blocks.0.q_proj\)"),
    (put("lora_B.weight", lambda b: b[:-1]), {}, r"1 misshapen \(.*attn_out \(63, 64\) not \(64, 64\)\)"),
    (put("lora_A.weight", lambda a: a[:2]), {}, r"1 not matrices of rank 4 \(.*attn_out.lora_A\)"),
    (put("lora_A.weight", lambda a: a.flatten()), {}, "1 not matrices of rank 4"),
    (None, {"r": 8}, "16 not matrices of rank 8"),
    (put("lora_B.weight", lambda b: b * float("nan")), {}, r"1 not finite \(.*attn_out.lora_B\)"),
    (put("lora_A.weight", lambda a: a / 0), {}, r"1 not finite \(.*attn_out.lora_A\)"),
    (lambda tensors: {k: v * ("lora_A" in k) for k, v in tensors.items()}, {}, "no lora_B that is not zero"),
    (lambda tensors: {}, {}, "no lora_B that is not zero"),
    (None, {"lora_alpha": 0}, "changes no weight in torch.float32"),
    (None, {"lora_alpha": 1e-12}, "changes no weight in torch.float32"),
    (None, {"r": None}, "r missing"),
    (None, {"peft_type": "LOHA"}, "peft_type is 'LOHA': only plain LoRA"),
    (None, {"use_dora": True}, "use_dora is True"),
    (None, {"bias": "all"}, "bias is 'all'"),
    (None, {"lora_bias": True}, "lora_bias is True"),
    (None, {"fan_in_fan_out": True}, "fan_in_fan_out is True"),
    (None, {"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    (None, {"alpha_pattern": {"q_proj": 4}}, "alpha_pattern is"),
    (None, {"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
    (None, {"layers_to_transform": [0]}, "layers_to_transform is"),
    (None, {"layer_replication": [[0, 1]]}, "layer_replication is"),
    (None, {"trainable_token_indices": [3]}, "trainable_token_indices is"),
    (None, {"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa': only plain LoRA"),
    (None, {"use_something_new": True}, "use_something_new is True"),
]


@pytest.mark.parametrize(("edit", "changes", "said"), FAULTS, ids=[said for _, _, said in FAULTS])
def test_an_adapter_that_would_not_do_what_it_says_is_refused(tmp_path, edit, changes, said):
    module = load_module(VECTORS / "llada")
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    with pytest.raises(ValueError, match=said) as raised:
        load_adapter(copy("llada", tmp_path, edit, **changes)).merge(module)
    assert "\n" not in str(raised.value)
    assert all(torch.equal(weight, before[name]) for name, weight in module.state_dict().items())


def test_an_adapter_of_another_model_is_refused():
    with pytest.raises(ValueError, match="tensors without a targeted matrix"):
        load_network(VECTORS / "dream", adapter=VECTORS / "llada" / "lora")


def test_an_adapter_folder_must_be_whole(tmp_path):
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        folder = copy("llada", tmp_path / name)
        (folder / name).unlink()
        with pytest.raises(FileNotFoundError, match=f"{name} is missing"):
            load_adapter(folder)


def test_targets_may_be_a_pattern(tmp_path):
    pattern = r".*\.(q_proj|k_proj|v_proj|attn_out)"
    network = load_network(VECTORS / "llada", adapter=copy("llada", tmp_path, target_modules=pattern))
    assert worst(network, "llada") < 1e-4
