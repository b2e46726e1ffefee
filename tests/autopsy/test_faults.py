"""What an autopsy must find: faults planted in sound files, each with the finding that names it, and nothing else.

The faults of one table are in one file. They are in different tensors or settings, and each has a finding of its own.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest

from kl_lens.targets.openvino.rewrites import operations
from tests.autopsy import planting
from tests.autopsy.conftest import TEMPLATE, Examine, Sound
from tests.autopsy.planting import Array

Plant = Callable[[Path], object]
Fault = tuple[
    Plant, str, tuple[str, ...]
]  # what is done, the step that is blamed, what the finding says
NOISE = np.random.default_rng(0)
MAMBA = "model.layers.1.mamba"


def values(
    *names: str, how: Callable[[Array], Array], says: str, listed: str = ""
) -> Fault:
    """Other values of one or several tensors, which one finding names."""

    def plant(folder: Path) -> None:
        for name in names:
            planting.change(folder, name, how)

    return plant, "weights", (names[0], listed, says)


def swapped(one: str, two: str) -> Fault:
    return (
        lambda folder: planting.swap(folder, one, two),
        "weights",
        (f"{one} and {two} are swapped",),
    )


def keys(says: str, **changes: Any) -> Fault:
    """Other metadata of a GGUF; __ for a dot. What is called gives the new value from the old one."""
    named = {key.replace("__", "."): value for key, value in changes.items()}
    step = "tokenizer" if "tokenizer" in next(iter(named)) else "metadata"
    return lambda folder: planting.rewritten(folder, named), step, (says,)


def part(v: Array, at: int | slice, width: int, new: Any) -> Array:
    """Some of its values, counted in runs of `width`, replaced."""
    runs = v.copy().reshape(-1, width)
    runs[at] = new(runs[at])
    return runs.reshape(v.shape)


def halves_to_pairs(v: Array) -> Array:
    return v.reshape(-1, 2, 32, v.shape[1]).swapaxes(1, 2).reshape(v.shape)


def noisy(v: Array) -> Array:
    return v + 0.5 * v.std() * NOISE.standard_normal(v.shape)


def infinite(folder: Path) -> None:
    planting.gguf_bytes(folder, "blk.1.ssm_out.weight")[:2] = np.array(
        [np.inf], np.float16
    ).view(np.uint8)


def shortened(folder: Path) -> None:
    rows = planting.values(folder, "token_embd.weight")[:3000]
    planting.rewritten(folder, tensors={"token_embd.weight": rows})


def epsilon(graph: ov.Model) -> None:
    for node in operations(graph, "Constant"):
        single = node.data.size == 1 and node.get_element_type() == ov.Type.f32
        if single and np.isclose(node.data.flat[0], 1e-5):
            constant = ops.constant(np.full(node.data.shape, 5e-3, np.float32)).output(0)
            for reader in node.output(0).get_target_inputs():
                reader.replace_source_output(constant)


def sigmoid(graph: ov.Model) -> None:
    gate = operations(graph, "Swish")[-2]
    for reader in gate.output(0).get_target_inputs():
        reader.replace_source_output(ops.sigmoid(gate.input_value(0)).output(0))


def ids_exchanged(content: dict[str, Any]) -> None:
    ids = content["model"]["vocab"]
    ids["e"], ids["t"] = ids["t"], ids["e"]


def merges_lost(content: dict[str, Any]) -> None:
    del content["model"]["merges"][-500:]


TABLES: dict[str, list[Fault]] = {
    "gguf, a converter": [
        values("blk.1.ssm_in.weight", how=lambda v: v / 2, says="values times 0.5"),
        values("blk.1.ssm_a", how=np.negative, says="values with the other sign"),
        values(
            "blk.0.attn_norm.weight", how=lambda v: v + 1, says="the original's values +1"
        ),
        values("blk.0.ssm_a", how=lambda v: np.log(-v), says="the logarithm of"),
        values("blk.1.ssm_dt.bias", how=np.zeros_like, says="all values are 0"),
        values("blk.1.ssm_d", how=np.ones_like, says="all values are 1"),
        values(
            "blk.0.ssm_conv1d.weight",
            "blk.1.ssm_conv1d.weight",
            how=lambda v: v[:, ::-1],
            says="taps are in reverse order",
            listed="blk.0.ssm_conv1d.weight and blk.1.ssm_conv1d.weight",
        ),
        values(
            "blk.1.attn_q.weight",
            "blk.1.attn_k.weight",
            how=halves_to_pairs,
            says="the other rotary layout",
            listed="blk.1.attn_q.weight and blk.1.attn_k.weight",
        ),
        values(
            "blk.0.ffn_down.weight",
            how=lambda v: np.roll(v, 3, 0),
            says="rows are shifted by 3 places",
        ),
        swapped("blk.0.ssm_out.weight", "blk.1.ssm_out.weight"),
    ],
    "gguf, the same and damage": [
        values("blk.0.ffn_up.weight", how=np.zeros_like, says="all values are 0"),
        values("blk.1.ssm_out.weight", how=np.transpose, says="transposed"),
        values(
            "blk.0.attn_v.weight",
            how=lambda v: v[NOISE.permutation(len(v))],
            says="128 rows are at other places",
        ),
        values(
            "blk.0.ffn_down.weight",
            how=lambda v: v.reshape(256, -1, 2, 16)[:, :, ::-1].reshape(v.shape),
            says="512 of 512 columns are at other places",
        ),
        values(
            "blk.1.ssm_a",
            how=lambda v: v[[0, 5, 2, 3, 4, 1, 6, 7]],
            says="values 1 and 5 are swapped",
        ),
        values(
            "blk.0.ssm_d",
            how=lambda v: part(v, 3, 1, np.negative),
            says="1 of 8 values have the wrong sign",
        ),
        values(
            "output_norm.weight",
            how=lambda v: part(v, 7, 1, lambda v: 5.0),
            says="1 of 256 values are not the original's, from number 7 on",
        ),
        values(
            "token_embd.weight",
            how=lambda v: part(v, slice(3000, None), 256, np.zeros_like),
            says="1,096 of 4,096 rows are zero, from number 3,000 on",
        ),
        values(
            "blk.0.ssm_in.weight",
            how=lambda v: part(v, 9, 32, lambda v: 1.0),
            says="1 of 584 rows are not the original's, from number 1 on",
        ),
    ],
    "gguf, copies and noise": [
        (
            lambda f: planting.change(
                f,
                "blk.1.ffn_gate.weight",
                lambda _: planting.values(f, "blk.1.ffn_up.weight"),
            ),
            "weights",
            ("blk.1.ffn_gate.weight holds the values of blk.1.ffn_up.weight",),
        ),
        values(
            "blk.0.attn_q.weight",
            "blk.0.attn_k.weight",
            "blk.0.ssm_in.weight",
            how=noisy,
            says="Block 0 is",
        ),
        swapped("blk.0.ssm_dt.bias", "blk.1.ssm_dt.bias"),
    ],
    "gguf, not finite": [
        (
            infinite,
            "weights",
            ("blk.1.ssm_out.weight", "32 of 65,536 values are not finite"),
        )
    ],
    "gguf, missing": [
        (
            lambda f: planting.rewritten(f, tensors={"blk.1.ssm_d": None}),
            "weights",
            ("missing: blk.1.ssm_d",),
        ),
    ],
    "gguf, fewer rows": [
        (
            shortened,
            "weights",
            ("token_embd.weight", "its shape is 3000×256, not 4096×256"),
        )
    ],
    "gguf, settings": [
        keys(
            "epsilon is 0.01 in the file, 1e-05 in the original; falcon-h1.rope.freq_base is 500 in the file, 10000",
            **{
                "falcon-h1__attention__layer_norm_rms_epsilon": 1e-2,
                "falcon-h1__rope__freq_base": 500.0,
            },
        ),
        keys(
            "eos_token_id is 17 in the file, 0 in the original",
            tokenizer__ggml__eos_token_id=17,
        ),
        keys(
            "add_bos_token is True in the file, False",
            tokenizer__ggml__add_bos_token=True,
        ),
        keys(
            "500 of 3,838 merges are not the original's: ",
            tokenizer__ggml__merges=lambda m: m[:-500],
        ),
        keys(
            "The chat template was changed: it has 'model|>' where the original's has 'assistant|>'",
            tokenizer__chat_template=TEMPLATE.replace("<|assistant", "<|model"),
        ),
    ],
    "gguf, other tokens": [
        keys(
            "4,094 of 4,096 tokens are not the original's: token 1 is",
            tokenizer__ggml__tokens=lambda t: [t[0], *t[:0:-1]],
        ),
        keys("The chat template was removed", tokenizer__chat_template=None),
    ],
    "gguf, other merges": [keys("merge 0 is", tokenizer__ggml__merges=lambda m: m[::-1])],
    "gguf, other splits": [
        keys(
            "ggml.pre is llama-bpe in the file, gpt-2 in the original; ",
            tokenizer__ggml__pre="llama-bpe",
        ),
    ],
    "gguf, a token's type": [
        keys(
            "1 of 4,096 token types are not the original's: token type 4095 is 1 in the file, 3",
            tokenizer__ggml__token_type=lambda t: [*t[:4095], 1],
        ),
        keys(
            "", **{"falcon-h1__rope__freq_base": None}
        ),  # llama.cpp's own is the same: no fault
    ],
    "openvino": [
        values(
            f"{MAMBA}.in_proj.weight",
            f"{MAMBA}.dt_bias",
            how=lambda v: v / 2,
            says="values times 0.5",
            listed=f"{MAMBA}.dt_bias",
        ),
        values(
            f"{MAMBA}.D",
            how=lambda v: part(v, 3, 1, np.negative),
            says="1 of 8 values have the wrong sign",
        ),
        values(f"{MAMBA}.A_log", how=np.zeros_like, says="all values are 0"),
        (
            lambda f: planting.regraphed(f, epsilon),
            "metadata",
            ("epsilon of a norm is 0.005 in the file, 1e-05",),
        ),
        (
            lambda f: planting.edited(f, "tokenizer.json", ids_exchanged),
            "tokenizer",
            ("2 of 4,096 tokens are not the original's: token", "becomes ["),
        ),
        (
            lambda f: (f / "chat_template.jinja").unlink(),
            "tokenizer",
            ("chat template was removed",),
        ),
    ],
    "openvino, its graph": [
        (
            lambda f: planting.regraphed(f, sigmoid),
            "runtime",
            (
                "does not compute what the weights say",
                "not the weights: all 34 tensors were",
            ),
        )
    ],
    "mlx": [
        (
            lambda f: planting.edited(
                f, "config.json", lambda c: c | {"rope_theta": 500.0}
            ),
            "metadata",
            ("config.json: rope_theta is 500 in the file, 10000 in the original",),
        ),
        (
            lambda f: planting.edited(f, "tokenizer.json", merges_lost),
            "tokenizer",
            ("500 of 3,838 merges are",),
        ),
        (
            lambda f: planting.edited(
                f, "generation_config.json", lambda c: c | {"eos_token_id": 9}
            ),
            "tokenizer",
            ("eos_token_id is 9 in the file, 0 in the original",),
        ),
    ],
}
SLOW = (
    "openvino, its graph",
    "gguf, other splits",
    "gguf, a token's type",
    "gguf, fewer rows",
)


@pytest.mark.parametrize(
    "table",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in TABLES],
)
def test_planted_faults(copied: Sound, examine: Examine, table: str) -> None:
    folder = copied(table.partition(",")[0])
    expected = [fault for fault in TABLES[table] if fault[2][0]]
    for plant, _, _ in TABLES[table]:
        plant(folder)
    result = examine(folder)
    faults = [(fault.step, fault.words) for fault in result.faults]
    shown = "\n".join(map(str, faults))
    for _, step, words in expected:
        named = [1 for s, w in faults if s == step and all(word in w for word in words)]
        assert len(named) == 1, f"{words}:\n{shown}"
    assert len(faults) == len(expected), shown
    costs = [fault.kl for fault in result.faults if fault.kl is not None]
    assert costs == sorted(costs, reverse=True)
    assert all(cost >= 0 and math.isfinite(cost) for cost in costs)
    assert all(
        fault.advice and "convert the model again" not in fault.advice
        for fault in result.faults
    )
    assert "It is not the weights" not in str(result) or "weights" not in {
        step for step, _ in faults
    }
    if faults:
        assert result.headline.startswith(faults[0][1])
        assert (f"and {len(faults) - 1} more" in result.headline) == (len(faults) > 1)
    assert any(
        "no longer what KL Lens exported" in finding.words for finding in result.findings
    )
