"""Opening models: every layout that is promised, and one clear line for everything that is wrong."""

import functools
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kl_lens.base.errors import CheckpointError
from kl_lens.model import LoadedModel, load
from tests.families import CONFIGS, slow, tiny_model, token_ids

QUICK = ("mamba", "zamba2", "jamba_experts")


@pytest.mark.parametrize(
    "family",
    [f if f in QUICK else slow(f) for f in CONFIGS],
)
def test_every_family_opens_from_a_folder(family: str, saved) -> None:
    folder = saved(family)
    model = load(folder)
    assert model.tokenizer is None
    assert next(model.model.parameters()).dtype == torch.float32
    assert not any(p.requires_grad for p in model.model.parameters())
    with torch.inference_mode():
        expected = tiny_model(family)(token_ids(1, 9), use_cache=False).logits
    torch.testing.assert_close(
        model.chain.full_logits(token_ids(1, 9)), expected, rtol=1e-4, atol=1e-4
    )


def _save(weights: dict[str, torch.Tensor], folder: Path) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _shards(suffix: str, save: Callable[..., object]) -> Callable[[Path], None]:
    """The weights in two files, and an index that lists them in another order than they are stored in."""

    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = {
            f"part-{half}-of-2.{suffix}": sorted(weights)[half::2] for half in (1, 0)
        }
        for file, tensors in names.items():
            save({name: weights[name] for name in tensors}, folder / file)
        weight_map = {
            name: file for file, tensors in names.items() for name in reversed(tensors)
        }
        stem = "model" if suffix == "safetensors" else "pytorch_model"
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))

    return change


def _pickled(**options: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        torch.save(
            load_file(folder / "model.safetensors"),
            folder / "pytorch_model.bin",
            **options,
        )
        (folder / "model.safetensors").unlink()

    return change


LAYOUTS: dict[str, Callable[[Path], None]] = {
    "shards": _shards(
        "safetensors", functools.partial(save_file, metadata={"format": "pt"})
    ),
    "pickled shards": _shards("bin", torch.save),
    "pickled": _pickled(),
    "pickled by an old torch": _pickled(_use_new_zipfile_serialization=False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_open_however_they_are_stored(layout: str, saved) -> None:
    folder = saved("mamba")
    expected = load(folder).fingerprint
    LAYOUTS[layout](folder)
    assert load(folder).fingerprint == expected
    lost = next(iter(sorted(folder.glob("part-1*"))), None)
    if lost is not None:
        lost.unlink()
        with pytest.raises(CheckpointError, match=rf"shard {lost.name} is missing"):
            load(folder)


def test_the_dtype_is_as_asked_and_the_fingerprint_follows_the_weights(saved) -> None:
    folder = saved("mamba")
    assert next(load(folder, dtype="bfloat16").model.parameters()).dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match="int8"):
        load(folder, dtype="int8")
    first = load(folder).fingerprint
    _holding("backbone.layers.0.mixer.in_proj.weight", 1.0)(folder)
    assert load(folder).fingerprint != first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_stored_as_embedding_and_as_head_is_one_component(
    saved, dtype: torch.dtype
) -> None:
    """Checkpoints of Mamba-2 are stored so, and their config.json does not say that the two are tied. Values count."""
    folder = saved("mamba2")
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" in weights, "untied"
    embedding = weights["backbone.embeddings.weight"]
    embedding.copy_(embedding.to(dtype))[0, 0] = 0
    weights["lm_head.weight"] = embedding.to(dtype, copy=True)
    weights["lm_head.weight"][0, 0] = -0.0
    _save(weights, folder)
    model = load(folder)
    on_disk = load(folder, weights="disk")
    assert model.anatomy.head == model.anatomy.embedding == "backbone.embeddings"
    assert model.anatomy.component("lm_head").tied_with == ("lm_head",)
    assert on_disk.anatomy == model.anatomy
    assert on_disk.fingerprint == model.fingerprint

    weights["lm_head.weight"][-1, -1] += 1
    _save(weights, folder)
    for weights in ("memory", "disk"):
        assert load(folder, weights=weights).anatomy.head == "lm_head", (
            "nearly the same is not the same"
        )


# -- the mamba_ssm layout -----------------------------------------------------------------------------------


def _as_mamba_ssm(folder: Path, family: str, *, pickled: bool = False) -> torch.nn.Module:
    """Writes a tiny model the way the state-spaces/* originals are written."""
    model = tiny_model(family)
    weights = {
        name.replace("backbone.embeddings.", "backbone.embedding."): tensor.clone()
        for name, tensor in model.state_dict().items()
    }
    # A vocabulary of 97 padded to 104, as pad_vocab_size_multiple 8 asks.
    for name in ("backbone.embedding.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], torch.zeros(7, 64)])
    mamba2 = {
        "layer": "Mamba2",
        "d_state": 16,
        "headdim": 16,
        "chunk_size": 16,
        "ngroups": 1 + (family != "mamba2"),
    }
    config = {
        "d_model": 64,
        "n_layer": 4,
        "vocab_size": 97,
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
        "tie_embeddings": family == "mamba",
        "ssm_cfg": {"d_state": 8, "dt_rank": 5} if family == "mamba" else mamba2,
    } | (
        {}
        if family == "mamba"
        else {"attn_cfg": {}, "attn_layer_idx": [], "d_intermediate": 0}
    )
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(
            {k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors"
        )
    return model


@pytest.mark.parametrize("family", ["mamba", "mamba2", "mamba2_groups"])
@pytest.mark.parametrize("pickled", [True, False])
def test_the_mamba_ssm_layout_opens_and_says_which_tokenizer_to_pass(
    family: str, pickled: bool, tmp_path: Path
) -> None:
    original = _as_mamba_ssm(tmp_path, family, pickled=pickled)
    model = load(tmp_path)
    ids = token_ids(2, 11)
    assert model.layout == "mamba_ssm"
    logits = model.chain.full_logits(ids)
    assert logits.shape[-1] == 104, "padded to a multiple of 8"
    expected = LoadedModel(family, Path(), original, None).chain.full_logits(
        ids
    )  # with the authors' norm
    torch.testing.assert_close(logits[..., :97], expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(CheckpointError, match=r"--tokenizer.*EleutherAI/gpt-neox-20b"):
        model.require_tokenizer()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {
                "attn_layer_idx": [1],
                "attn_cfg": {"num_heads": 4},
                "ssm_cfg": {"layer": "Mamba2"},
            },
            "attention layers",
        ),
        ({"rms_norm": False}, "LayerNorm"),
        ({"ssm_cfg": {"layer": "Mamba3"}}, "Mamba3"),
        ({"d_intermediate": 128}, "MLP"),
        ({"ssm_cfg": {"layer": "Mamba2", "d_ssm": 64}}, "channels beside the scan"),
    ],
)
def test_mamba_ssm_settings_that_transformers_lacks_are_refused(
    change, message, tmp_path: Path
) -> None:
    _as_mamba_ssm(tmp_path, "mamba")
    _configured(**change)(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_pickle_that_holds_code_is_not_run(tmp_path: Path) -> None:
    _as_mamba_ssm(tmp_path, "mamba", pickled=True)
    marker = tmp_path / "owned"

    class Attack:
        def __reduce__(self):
            return (Path.touch, (marker,))

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(
        CheckpointError, match=r"is damaged or incomplete; .* more than tensors"
    ):
        load(tmp_path)
    assert not marker.exists()


# -- remote code --------------------------------------------------------------------------------------------


def test_remote_code_runs_only_when_allowed(remote_code_folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has its own code .*--trust-remote-code"):
        load(remote_code_folder)
    model = load(remote_code_folder, trust_remote_code=True)
    ids = token_ids(2, 9)
    assert model.anatomy.blocks == 3
    assert model.chain.calls(ids).hidden.shape[1] == 9 + 3, (
        "three meta tokens stand in front"
    )
    assert model.chain.doubt(ids) is None


# -- what is wrong, in one line -----------------------------------------------------------------------------


def _written(name: str, content: str | bytes | None) -> Callable[[Path], object]:
    """Writes a file, or (None) removes it."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (
        (folder / name).unlink() if data is None else (folder / name).write_bytes(data)
    )


def _configured(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def _holding(name: str, value: torch.Tensor | float | None) -> Callable[[Path], None]:
    """Another tensor under this name, none, or another last number in it."""

    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        if isinstance(value, float):
            weights[name].view(-1)[-1] = value
        elif value is None:
            del weights[name]
        else:
            weights[name] = value
        _save(weights, folder)

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            _holding("backbone.extra", torch.zeros(128)),
            r"backbone\.extra is not in config",
        ),
        (
            _configured(num_hidden_layers=2),
            r"backbone\.layers\.2\.\S+ \(and 19 more\) is not in config",
        ),
        (
            _configured(num_hidden_layers=10**12),
            "num_hidden_layers is 1000000000000, but .* only 42 tensors",
        ),
        (
            _configured(hidden_size=10**12),
            r"hidden_size is 1000000000000, but .* only \d+ bytes",
        ),
        (_configured(hidden_act="nonsense"), "hidden_act is 'nonsense'"),
        (_configured(auto_map=None), "auto_map must name"),
        (_configured(layer_norm_epsilon=math.nan), "it contains NaN"),
        (_configured(model_type="caterpillar"), "does not know model_type 'caterpillar'"),
        (
            _holding("backbone.layers.1.mixer.A_log", math.nan),
            r"layers\.1\.mixer\.A_log is NaN",
        ),
        (_holding("backbone.norm_f.weight", None), r"lack backbone\.norm_f\.weight"),
        (
            _holding("backbone.norm_f.weight", torch.ones(63)),
            r"norm_f\.weight has shape \(63,\), .*asks for \(64,\)",
        ),
        (_written("config.json", None), "no config.json"),
        (_written("config.json", '{"model_type": '), "not valid JSON"),
        (_written("model.safetensors", None), "no weights"),
        (
            _written("model.safetensors", "this is no safetensors file at all"),
            "is damaged or incomplete; download it again",
        ),
    ],
)
def test_a_damaged_folder_gives_one_line_that_says_what_is_wrong(
    damage, message, saved
) -> None:
    folder = saved("mamba")
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_buffers_of_older_versions_do_no_harm_and_what_is_left_out_is_said(saved) -> None:
    folder = saved("llama")
    _holding("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8))(folder)
    assert not load(folder).notes
    _holding("mtp.layers.0.eh_proj.weight", torch.ones(8, 8))(folder)
    for weights in ("memory", "disk"):
        assert (
            "Not opened: mtp.layers.0.eh_proj.weight. Heads"
            in load(folder, weights=weights).notes[0]
        )
