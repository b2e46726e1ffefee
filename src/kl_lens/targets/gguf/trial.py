"""Tries a llama.cpp library out on a tiny Mamba in every format that plans use, in a process of its own.

python -m kl_lens.targets.gguf.trial, with LLAMA_CPP_LIB set. Prints each format before it is multiplied with, so that
whoever started it knows which one ended the process. Needs numpy and gguf, like running a file, and not torch.
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

# Type → where a block keeps its factors (half precision), and their ratio that puts the middle of the grid at zero.
_FACTORS: dict[str, dict[int, float]] = {
    "Q8_0": {0: 1}, "Q4_0": {0: 1}, "IQ4_XS": {0: 1}, "Q3_K": {108: 1}, "Q4_K": {0: 1, 2: 7.5}, "Q5_K": {0: 1, 2: 15.5},
    "Q6_K": {208: 1},
}  # fmt: skip
_TILE = 16  # rows; the last ones of the head fill no pair
_WIDTH, _INNER, _STATE, _RANK, _VOCABULARY = 256, 512, 16, 32, 33 * _TILE
_PRODUCTS = {
    "token_embd.weight": (_VOCABULARY, _WIDTH), "blk.0.ssm_in.weight": (2 * _INNER, _WIDTH),
    "blk.0.ssm_x.weight": (_RANK + 2 * _STATE, _INNER), "blk.0.ssm_out.weight": (_WIDTH, _INNER),
}  # fmt: skip
_PROMPT, _STEPS = 40, (3, 5, 8)  # more than one row of AMX's tiles; tokens that go on from the state before
_MOST_ERROR = 0.3  # of the logits' size; activations in 8 bits give 0.01 to 0.11, other values about 1.4


def main() -> int:
    try:
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("F16", *_FACTORS):
                print(kind, flush=True)
                _try(kind, Path(folder) / "tiny.gguf")
    except KLLensError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _try(kind: str, path: Path) -> None:
    """The same values as blocks and in float32 must give the same logits."""
    gguf = gguf_module()
    random = np.random.default_rng(0)
    stored = {name: _blocks(kind, shape, random) for name, shape in _PRODUCTS.items()}
    type_of = gguf.GGMLQuantizationType
    plain = {
        name: gguf.quants.dequantize(data, type_of[kind]).astype(np.float32) for name, data in stored.items()
    }
    expected = _logits(path, plain, type_of.F32)
    error = _logits(path, stored, type_of[kind]) - expected
    tiles = (error**2).reshape(len(error), -1, _TILE).mean(axis=(0, 2))
    share = float(np.sqrt(tiles.max() / (expected**2).mean()))
    if not share < _MOST_ERROR:
        raise TargetError(f"its products are wrong, by {share:.0%} of the logits")


def _blocks(kind: str, shape: tuple[int, int], random: np.random.Generator) -> npt.NDArray[Any]:
    """A matrix of random blocks whose values are about as large as a model's."""
    gguf = gguf_module()
    size = shape[1] ** -0.5
    if kind == "F16":
        return (random.standard_normal(shape) * size).astype(np.float16)
    values, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (shape[0] * shape[1] // values, width), np.uint8)
    scale = 1.0
    for _ in range(2):  # with factors of one first, to see how large the values come out
        for place, ratio in _FACTORS[kind].items():
            blocks[:, place : place + 2] = np.array([scale * ratio], np.float16).view(np.uint8)
        rows = blocks.reshape(shape[0], -1)
        scale = size / float(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]).std())
    return rows


def _logits(path: Path, products: dict[str, npt.NDArray[Any]], kind: Any) -> Logits:
    _write(path, products, kind)
    with open_session(path, threads=1) as session:
        tokens = [(7 * index) % _VOCABULARY for index in range(_PROMPT)]
        return np.concatenate([session.logits(tokens), [session.step(token) for token in _STEPS]])


def _write(path: Path, products: dict[str, npt.NDArray[Any]], kind: Any) -> None:
    gguf = gguf_module()
    writer = gguf.GGUFWriter(path, "mamba")
    numbers = {
        "context_length": 512, "embedding_length": _WIDTH, "feed_forward_length": 0, "attention.head_count": 0,
        "block_count": 1, "ssm.conv_kernel": 4, "ssm.inner_size": _INNER, "ssm.state_size": _STATE,
        "ssm.time_step_rank": _RANK, "vocab_size": _VOCABULARY,
    }  # fmt: skip
    for name, number in numbers.items():
        writer.add_uint32(f"mamba.{name}", number)
    writer.add_bool("mamba.ssm.dt_b_c_rms", False)
    writer.add_float32("mamba.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("no_vocab")
    random = np.random.default_rng(1)
    others = {
        "output_norm.weight": np.ones(_WIDTH), "blk.0.attn_norm.weight": np.ones(_WIDTH),
        "blk.0.ssm_conv1d.weight": random.standard_normal((_INNER, 4)), "blk.0.ssm_conv1d.bias": np.zeros(_INNER),
        "blk.0.ssm_dt.weight": random.standard_normal((_INNER, _RANK)) * _RANK**-0.5,
        "blk.0.ssm_dt.bias": np.zeros(_INNER), "blk.0.ssm_d": np.ones(_INNER),
        "blk.0.ssm_a": -np.tile(np.arange(1.0, _STATE + 1), (_INNER, 1)),
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
