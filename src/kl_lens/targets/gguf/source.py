"""A GGUF file as the model: configuration, weights and tokenizer as transformers has them.

The rules by which a family is written are read backwards, and nothing is believed: the configuration that was found has
to give the file's own metadata, and every tensor of the file has to have its place. Weights stay in the file and are
read one at a time.
"""

from __future__ import annotations

import atexit
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from kl_lens.base.errors import CheckpointError, one_line
from kl_lens.model.anatomy import turn_matrices
from kl_lens.model.files import FOREIGN, Foreign, Stored, refusing
from kl_lens.targets.abilities import FLOATS
from kl_lens.targets.dissection import Part, StoredTensor, same
from kl_lens.targets.gguf.architectures import ARCHITECTURES
from kl_lens.targets.gguf.architectures.attention_only import FAMILIES
from kl_lens.targets.gguf.architectures.base import TensorRule, as_is, check_complete
from kl_lens.targets.gguf.dissection import WITHOUT_EFFECT, stored_tensor
from kl_lens.targets.gguf.header import FileInfo, parts_of, read_header
from kl_lens.targets.gguf.tokenizer import PREFIX, SPECIAL
from kl_lens.targets.gguf.vocabulary import write_tokenizer

_WAY_OUT = (
    "give the checkpoint that it was made from, org/model, where need be with llama.cpp's 16-bit file of it as "
    "--template FILE"
)
_folders: dict[tuple[Any, ...], Path] = {}


def opened(path: Path) -> Path:
    """A folder with configuration and tokenizer, whose weights are those of the file."""
    paths = parts_of(path)
    states = [file.stat() for file in paths]
    key = (*paths, *((state.st_size, state.st_mtime_ns) for state in states))
    if key not in _folders:
        place = tempfile.TemporaryDirectory(prefix="kl-lens-gguf-")
        atexit.register(place.cleanup)
        folder = Path(place.name)
        _write(paths[0], folder)
        _folders[key] = folder
    return _folders[key]


def _write(path: Path, folder: Path) -> None:
    info = read_header(path, whole=True)
    kind = _FAMILIES.get(info.architecture)
    if kind is None:
        raise CheckpointError(
            f"{path}: KL Lens cannot open GGUF files of {info.architecture} models; {_WAY_OUT}"
        )
    # A configuration class, or the rules, may stumble over anything that a file leaves out.
    with refusing(
        lambda error: (
            f"{path}: this {info.architecture} model cannot be opened ({one_line(error)}); {_WAY_OUT}"
        )
    ):
        config = _Rebuilt(info).config(kind)
        tensors = [*_tensors(info, config)]
    config.save_pretrained(folder)
    write_tokenizer(info, folder)
    FOREIGN[folder] = Foreign(path, tensors, _compared_with(info))


def _compared_with(info: FileInfo) -> str:
    sizes = Counter[str]()
    for tensor in info.tensors:
        sizes[tensor.type] += math.prod(tensor.shape)
    if all(name.lower() in FLOATS for name in sizes):
        return ""
    return f"compared with this {sizes.most_common(1)[0][0]} file, not with the original"


# -- the configuration ---------------------------------------------------------------------------------------


class _Rebuilt:
    """Settings from metadata, and from which tensors there are."""

    def __init__(self, info: FileInfo) -> None:
        self.info = info
        self.shapes = {tensor.name: tensor.shape for tensor in info.tensors}

    def value(self, key: str, default: Any = None) -> Any:
        name = self.info.architecture
        value = self.info.metadata.get(f"{name}.{key}", default)
        if key == "block_count":  # heads for further tokens are blocks too
            value -= self.info.metadata.get(f"{name}.nextn_predict_layers", 0)
        return value

    def config(self, kind: str) -> Any:
        """Raises if it does not give the file's metadata."""
        if kind == "mamba" and self.value("ssm.dt_b_c_rms"):
            kind = "falcon_mamba"
        if kind == "granitemoehybrid" and self.value("attention.scale") is None:
            kind = "bamba"
        architecture = ARCHITECTURES[kind]
        make = transformers.CONFIG_MAPPING[kind]
        values = self._common(kind) | _SETTINGS[kind](self)
        if values.get("rope_parameters", {}) is None:
            del values["head_dim"]  # transformers would hold it against a usual rope
        # What metadata says in the words of the configuration.
        settings = architecture.settings(make(**values))
        for key, name in settings.items():
            if type(name) is str and (value := self.value(key)) is not None:
                values[name] = value
        config = make(**values)
        for key, wanted in architecture.metadata(config).items():
            actual = self.value(key)
            if key in WITHOUT_EFFECT or actual is None or same(actual, wanted):
                continue
            raise CheckpointError(
                f"{self.info.paths[0]}: its {key} is {actual}, but the configuration that KL Lens can make of the file "
                f"gives {wanted}; {_WAY_OUT}"
            )
        for reason in architecture.refusals(config):
            raise CheckpointError(f"{self.info.paths[0]}: {reason}; {_WAY_OUT}")
        return config

    def _common(self, kind: str) -> dict[str, Any]:
        heads = _longest(self.value("attention.head_count"))
        width = self.value("embedding_length")
        values = {
            f"{short}_token_id": self.info.metadata.get(f"{PREFIX}{name}_token_id")
            for name, short in SPECIAL.items()
        }
        values |= {
            "vocab_size": self.shapes["token_embd.weight"][0],
            "hidden_size": width,
            "num_hidden_layers": self.value("block_count"),
            "tie_word_embeddings": "output.weight" not in self.shapes,
        }
        if feed_forward := _longest(self.value("feed_forward_length")):
            values["n_inner" if kind == "gpt2" else "intermediate_size"] = feed_forward
        if heads:
            size = self.value("attention.key_length", width // heads)
            values |= {
                "num_attention_heads": heads,
                "num_key_value_heads": _longest(
                    self.value("attention.head_count_kv", heads)
                ),
                "head_dim": size,
                "rope_parameters": self._rope(size),
            }
            if original := self.value("rope.scaling.original_context_length"):
                values["original_max_position_embeddings"] = original  # as Phi 3 has it
            if kind in ("llama", "granite"):
                for name, tensor in (("attention", "attn_output"), ("mlp", "ffn_up")):
                    values[f"{name}_bias"] = f"blk.0.{tensor}.bias" in self.shapes
        return values

    def _rope(self, size: int) -> dict[str, Any]:
        kind = self.value("rope.scaling.type", "default")
        rope: dict[str, Any] = {
            "rope_type": "default" if kind == "none" else kind,
            "rope_theta": self.value("rope.freq_base", 10000.0),
        }
        if turning := self.value("rope.dimension_count"):
            rope["partial_rotary_factor"] = turning / size
        if factor := self.value("rope.scaling.factor"):
            rope["factor"] = factor
        if original := self.value("rope.scaling.original_context_length"):
            rope["original_max_position_embeddings"] = int(original)
        if "rope_freqs.weight" in self.shapes:
            rope |= _llama3(self.values("rope_freqs.weight"), rope["rope_theta"])
        for name in ("long", "short"):
            if (tensor := f"rope_factors_{name}.weight") in self.shapes:
                rope[f"{name}_factor"] = self.values(tensor).tolist()
        return rope

    def values(self, name: str) -> torch.Tensor:
        entry = next(entry for entry in self.info.tensors if entry.name == name)
        return stored_tensor(entry).read().flatten()

    def layers(self, tensor: str) -> list[int]:
        """Those that have this tensor."""
        count = range(self.value("block_count"))
        return [index for index in count if f"blk.{index}.{tensor}" in self.shapes]

    def kinds(self, other: str) -> dict[str, list[str]]:
        """Of layers, in which attention and something other alternate."""
        kinds = [other] * self.value("block_count")
        for index in self.layers("attn_q.weight"):
            kinds[index] = "full_attention"
        return {"layer_types": kinds}

    def heads(self, count: str, size: str, expand: str = "expand") -> dict[str, int]:
        """Of state-space layers, under a family's names."""
        inner = self.value("ssm.inner_size")
        heads = self.value("ssm.time_step_rank")
        width = self.value("embedding_length")
        return {count: heads, size: inner // heads, expand: inner // width}


def _longest(value: Any) -> int:
    """Of a setting that each layer may have for itself."""
    return int(max(value) if isinstance(value, list) else value or 0)


def _llama3(factors: torch.Tensor, base: float) -> dict[str, Any]:
    """The settings behind the factors of frequencies, with the bounds that every Llama has; checked like all else."""
    factor = float(factors.max())
    original = 8192.0
    waves = 2 * math.pi * base ** (torch.arange(len(factors)) / len(factors))
    for wave, middle in zip(waves.tolist(), factors.tolist(), strict=True):
        if 1.01 < middle < 0.99 * factor:
            share = (1 / middle - 1 / factor) / (1 - 1 / factor)
            original = wave * (1 + 3 * share)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": round(original),
    }


def _gemma(file: _Rebuilt) -> dict[str, Any]:
    size = file.value("attention.key_length")
    local = file.value("rope.freq_base_swa", 10000.0)
    return {
        "query_pre_attn_scalar": size,
        "layer_types": [
            "sliding_attention" if (index + 1) % 6 else "full_attention"
            for index in range(file.value("block_count"))
        ],
        "rope_parameters": {
            "full_attention": file._rope(size),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "final_logit_softcapping": file.value("final_logit_softcapping"),
    }


def _granite(file: _Rebuilt) -> dict[str, Any]:
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {name: file.value(key, 1.0) for name, key in names.items()}


_MAMBA2 = ("mamba_n_heads", "mamba_d_head", "mamba_expand")


def _granite_hybrid(file: _Rebuilt) -> dict[str, Any]:
    shared = file.value("expert_shared_feed_forward_length")
    rotates = file.value("rope.scaling.finetuned")
    without_rope = {"position_embedding_type": None, "rope_parameters": None}
    return {
        **_granite(file),
        **file.heads(*_MAMBA2),
        **file.kinds("linear_attention"),
        **({"position_embedding_type": "rope"} if rotates else without_rope),
        "num_local_experts": file.value("expert_count", 0),
        "num_experts_per_tok": file.value("expert_used_count", 0),
        "shared_intermediate_size": shared or file.value("feed_forward_length"),
    }


def _falcon_h1(file: _Rebuilt) -> dict[str, Any]:
    """Its multipliers are in the weights."""
    parts = ("attention_in", "attention_out", "embedding", "key", "lm_head")
    ones = (*parts, "ssm_in", "ssm_out")
    return {
        **file.heads(*_MAMBA2),
        **{f"{name}_multiplier": 1.0 for name in ones},
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
        "mamba_d_ssm": file.value("ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.shapes,
        "mamba_norm_before_gate": False,
    }


def _jamba(file: _Rebuilt) -> dict[str, Any]:
    values = {}
    tensors = {"attn": "attn_q.weight", "expert": "ffn_gate_inp.weight"}
    for name, tensor in tensors.items():
        first, second, *_ = (*file.layers(tensor), 0, 0)
        values[f"{name}_layer_offset"] = first
        values[f"{name}_layer_period"] = max(second - first, 0) or first + 1
    return values | {
        "num_experts": file.value("expert_count") or 1,
        "num_experts_per_tok": file.value("expert_used_count") or 1,
        "use_mamba_kernels": False,
    }


def _nemotron_h(file: _Rebuilt) -> dict[str, Any]:
    kinds = ["mamba"] * file.value("block_count")
    of_tensors = {
        "attn_q.weight": "attention",
        "ffn_up.weight": "mlp",
        "ffn_up_exps.weight": "moe",
    }
    for tensor, kind in of_tensors.items():
        for index in file.layers(tensor):
            kinds[index] = kind
    return {
        **file.heads("mamba_num_heads", "mamba_head_dim"),
        "layers_block_type": kinds,
        "norm_topk_prob": file.value("expert_weights_norm", True),
        "routed_scaling_factor": file.value("expert_weights_scale", 1.0),
        "n_group": 1,
        "topk_group": 1,
    }


def _mamba(file: _Rebuilt) -> dict[str, Any]:
    return {
        # Of Falcon-Mamba, whose norms have one epsilon in llama.cpp.
        "mixer_rms_eps": file.value("attention.layer_norm_rms_epsilon"),
    }


def _qwen(file: _Rebuilt) -> dict[str, Any]:
    return file.kinds("linear_attention") | file.heads(
        "linear_num_value_heads", "linear_value_head_dim"
    )


def _lfm2(file: _Rebuilt) -> dict[str, Any]:
    return file.kinds("conv") | {"block_auto_adjust_ff_dim": False}


_SETTINGS: dict[str, Callable[[_Rebuilt], dict[str, Any]]] = {
    **dict.fromkeys(FAMILIES, lambda _: {}),
    "gemma3_text": _gemma,
    "qwen3_moe": lambda _: {"norm_topk_prob": True},
    "granite": _granite,
    "granitemoehybrid": _granite_hybrid,
    "falcon_h1": _falcon_h1,
    "jamba": _jamba,
    **dict.fromkeys(("lfm2", "lfm2_moe"), _lfm2),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _qwen),
    "bamba": lambda file: {
        **file.heads(*_MAMBA2),
        "attn_layer_indices": file.layers("attn_q.weight"),
    },
    "nemotron_h": _nemotron_h,
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "mamba2": lambda file: file.heads("num_heads", "head_dim"),
}
# llama.cpp's architectures → transformers' model types; the first of several.
_FAMILIES: Mapping[Any, str] = {
    **{ARCHITECTURES[kind].names[kind]: kind for kind in reversed(_SETTINGS)},
    "granitehybrid": "granitemoehybrid",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
}


# -- the weights ---------------------------------------------------------------------------------------------


def _tensors(info: FileInfo, config: Any) -> Iterator[Stored]:
    """Every parameter, made from the tensors of the file when it is read."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    turn_matrices(model)
    turned = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if hasattr(module, "is_turned")
    }
    shapes: dict[str, tuple[int, ...]] = {}
    seen = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            shapes[name] = tuple(tensor.shape)
    architecture = ARCHITECTURES[config.model_type]
    rules = architecture.tensors(config, shapes)
    check_complete(rules, shapes)
    entries = {entry.name: entry for entry in info.tensors}
    names = {rule.name for rule in rules}
    further = f"blk.{config.num_hidden_layers}."  # heads for further tokens
    unknown = [n for n in entries if n not in names and not n.startswith(further)]
    if unknown:
        raise CheckpointError(
            f"{info.paths[0]}: {unknown[0]} has no place in {config.model_type}; {_WAY_OUT}"
        )
    sources: dict[str, list[tuple[TensorRule, StoredTensor]]] = {}
    for rule in rules:
        if rule.name not in entries:
            raise CheckpointError(f"{info.paths[0]} lacks {rule.name}; {_WAY_OUT}")
        stored = stored_tensor(entries[rule.name])
        if rule.parameter is None:
            _require_constant(info.paths[0], rule, stored)
        else:
            sources.setdefault(rule.parameter, []).append((rule, stored))
    for name, parts in sources.items():
        path = entries[parts[0][0].name].path
        size = 4 * math.prod(shapes[name])
        read = partial(_made, info.paths[0], shapes[name], parts, name in turned)
        shape = shapes[name][::-1] if name in turned else shapes[name]
        yield Stored(path, name, "F32", shape, size, made=read)


def _require_constant(path: Path, rule: TensorRule, stored: StoredTensor) -> None:
    """Of what follows from the configuration alone."""
    actual = stored.read().flatten()
    expected = torch.tensor(rule.constant)
    if actual.shape != expected.shape or not torch.allclose(actual, expected, 1e-4):
        raise CheckpointError(
            f"{path}: {rule.name} holds other numbers than expected; {_WAY_OUT}"
        )


def _made(
    path: Path,
    shape: tuple[int, ...],
    parts: Sequence[tuple[TensorRule, StoredTensor]],
    is_turned: bool,
) -> torch.Tensor:
    """A parameter as a checkpoint has it: GPT-2's matrices lie the other way."""
    whole = torch.full(shape, math.nan)
    for rule, stored in parts:
        with refusing(f"{path}: {rule.name} cannot be read"):
            whole = _written(rule, stored, whole)
    return whole.T if is_turned else whole


def _written(rule: TensorRule, stored: StoredTensor, whole: torch.Tensor) -> torch.Tensor:
    """The parameter with these values in it, found by sending the numbers of its rows through the rule."""
    values = stored.read()
    if rule.float32:
        part = Part(rule.name, stored, rule.parameter, rule.arranged, rule.factors)
        made = part.written(values, whole)
        if made is None:
            raise ValueError(f"its shape is {stored.shape}")
        return made
    first, second = rule.columns
    if (first, second) != (1, 1):
        runs = values.unflatten(-1, (second, first, -1))
        values = runs.transpose(-3, -2).flatten(-3)
    if values.shape[-1] != whole.shape[-1]:
        raise ValueError(f"its shape is {stored.shape}")
    if rule.transform is as_is:
        return values.reshape(whole.shape)
    rows = torch.arange(math.prod(whole.shape[:-1])).reshape(*whole.shape[:-1], 1)
    index = rule.transform(rows).flatten()
    whole.view(-1, whole.shape[-1])[index] = values.reshape(len(index), -1)
    return whole
