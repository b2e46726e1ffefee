"""Tries a llama.cpp library on tiny models in every format that plans use, in a separate process.

python -m kl_lens.targets.gguf.trial, with LLAMA_CPP_LIB set. Prints each format before using it, so that the
parent process knows which one crashed. Needs numpy and gguf, like running a file, but not torch.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kl_lens.errors import KLLensError, TargetError
from kl_lens.formats.ggml import gguf_module
from kl_lens.targets.gguf.session import open_session
from kl_lens.targets.session import Logits

# Type → offsets of a block's factors (half precision), with the ratios that put the middle of the grid at zero.
_FACTORS: dict[str, dict[int, float]] = {
    "Q8_0": {0: 1}, "Q4_0": {0: 1}, "IQ4_XS": {0: 1}, "Q3_K": {108: 1}, "Q4_K": {0: 1, 2: 7.5}, "Q5_K": {0: 1, 2: 15.5},
    "Q6_K": {208: 1},
}  # fmt: skip
_TILE = 16  # rows; the last of the head and of Mamba-2's input do not fill a pair
_WIDTH, _INNER, _VOCABULARY = 256, 512, 33 * _TILE
_STATE = {"mamba": 16, "mamba2": 64}
_RANK = {"mamba": 32, "mamba2": 16}  # Mamba-2's is its number of heads
_CHANNELS = {"mamba": _INNER, "mamba2": _INNER + 2 * _STATE["mamba2"]}  # of the convolution
_PRODUCTS = {
    "mamba": {
        "token_embd.weight": (_VOCABULARY, _WIDTH), "blk.0.ssm_in.weight": (2 * _INNER, _WIDTH),
        "blk.0.ssm_x.weight": (_RANK["mamba"] + 2 * _STATE["mamba"], _INNER), "blk.0.ssm_out.weight": (_WIDTH, _INNER),
    },
    "mamba2": {
        "token_embd.weight": (_VOCABULARY, _WIDTH), "blk.0.ssm_out.weight": (_WIDTH, _INNER),
        "blk.0.ssm_in.weight": (_INNER + _CHANNELS["mamba2"] + _RANK["mamba2"], _WIDTH),
    },
}  # fmt: skip
_PROMPT, _STEPS = 40, (3, 5, 8)  # more than one row of AMX tiles; steps that continue from the state
_MOST_ERROR = 0.3  # relative to the logits; 8-bit activations give 0.01 to 0.11, wrong values about 1.4
_MOST_DRIFT = 0.1  # between a prompt and single steps; a lost state gives 1.1 to 1.9


def main() -> int:
    try:
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("F16", *_FACTORS):
                print(kind, flush=True)
                for model in _PRODUCTS:
                    try_model(model, kind, Path(folder) / "tiny.gguf")
    except KLLensError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def try_model(model: str, kind: str, path: Path) -> None:
    """The same values in blocks and in float32 must give the same logits, and single steps the same as a prompt."""
    gguf = gguf_module()
    random = np.random.default_rng(0)
    stored = {name: random_blocks(kind, shape, random) for name, shape in _PRODUCTS[model].items()}
    type_of = gguf.GGMLQuantizationType
    plain = {
        name: gguf.quants.dequantize(data, type_of[kind]).astype(np.float32) for name, data in stored.items()
    }
    write_model(path, model, plain, type_of.F32)
    expected, _ = _logits(path)
    write_model(path, model, stored, type_of[kind])
    logits, stepped = _logits(path)
    size = float((expected**2).mean())
    if not (share := _largest(logits - expected) / size) < _MOST_ERROR**2:
        raise TargetError(f"its products are wrong, by {share**0.5:.0%} of the logits")
    if not (share := _largest(stepped - logits[-len(_STEPS) :]) / size) < _MOST_DRIFT**2:
        raise TargetError(f"its states are wrong, by {share**0.5:.0%} of the logits")


def _largest(error: Logits) -> float:
    """The largest mean square of any tile."""
    return float((error**2).reshape(len(error), -1, _TILE).mean(axis=(0, 2)).max())


def random_blocks(kind: str, shape: tuple[int, int], random: np.random.Generator) -> npt.NDArray[Any]:
    """A matrix of random blocks whose values are about as large as a model's."""
    gguf = gguf_module()
    size = shape[1] ** -0.5
    if kind == "F16":
        return (random.standard_normal(shape) * size).astype(np.float16)
    values, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (shape[0] * shape[1] // values, width), np.uint8)
    scale = 1.0
    for _ in range(2):  # first with factors of one, to see how large the values are
        for place, ratio in _FACTORS[kind].items():
            blocks[:, place : place + 2] = np.array([scale * ratio], np.float16).view(np.uint8)
        rows = blocks.reshape(shape[0], -1)
        scale = size / float(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]).std())
    return rows


def _logits(path: Path) -> tuple[Logits, Logits]:
    """Logits of a prompt with some tokens in one call, and of those tokens fed one by one after it."""
    with open_session(path, threads=2) as session:
        prompt = [(7 * index) % _VOCABULARY for index in range(_PROMPT)]
        whole = session.logits([*prompt, *_STEPS])
        session.reset()
        session.prefill(prompt)
        return whole, np.stack([session.step(token) for token in _STEPS])


def write_model(path: Path, model: str, products: dict[str, npt.NDArray[Any]], kind: Any) -> None:
    gguf = gguf_module()
    writer = gguf.GGUFWriter(path, model)
    numbers = {
        "context_length": 512, "embedding_length": _WIDTH, "feed_forward_length": 0, "attention.head_count": 0,
        "block_count": 1, "ssm.conv_kernel": 4, "ssm.inner_size": _INNER, "ssm.state_size": _STATE[model],
        "ssm.time_step_rank": _RANK[model], "vocab_size": _VOCABULARY, "ssm.group_count": 1,
    }  # fmt: skip
    for name, number in numbers.items():
        writer.add_uint32(f"{model}.{name}", number)
    writer.add_bool(f"{model}.ssm.dt_b_c_rms", False)
    writer.add_float32(f"{model}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("no_vocab")
    random = np.random.default_rng(1)
    others = {
        "output_norm.weight": np.ones(_WIDTH), "blk.0.attn_norm.weight": np.ones(_WIDTH),
        "blk.0.ssm_conv1d.weight": random.standard_normal((_CHANNELS[model], 4)),
        "blk.0.ssm_conv1d.bias": np.zeros(_CHANNELS[model]),
    }  # fmt: skip
    if model == "mamba":
        rank, state = _RANK[model], _STATE[model]
        others |= {
            "blk.0.ssm_dt.weight": random.standard_normal((_INNER, rank)) * rank**-0.5,
            "blk.0.ssm_dt.bias": np.zeros(_INNER), "blk.0.ssm_d": np.ones(_INNER),
            "blk.0.ssm_a": -np.tile(np.arange(1.0, state + 1), (_INNER, 1)),
        }  # fmt: skip
    else:
        heads = _RANK[model]
        others |= {
            "blk.0.ssm_dt.bias": np.zeros(heads), "blk.0.ssm_d": np.ones((heads, 1)),
            "blk.0.ssm_a": -np.linspace(0.1, 1.0, heads)[:, None], "blk.0.ssm_norm.weight": np.ones((1, _INNER)),
        }  # fmt: skip
    for name, values in others.items():
        writer.add_tensor(name, values.astype(np.float32))
    for name, data in products.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    sys.exit(main())
