"""Our integers against the real NNCF and OpenVINO: same integers, same scales, same products, same bytes."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kl_lens.weights.formats import Format, get_format
from kl_lens.weights.formats.integer import ZeroPointFormat
from kl_lens.weights.formats.tables import NF_BORDERS

ov = pytest.importorskip("openvino", reason="the extra 'openvino' is not installed")
nncf = pytest.importorskip("nncf", reason="the extra 'openvino' is not installed")
from openvino import opset13 as op  # noqa: E402
from tests.families import slow  # noqa: E402

from kl_lens.targets.openvino.constants import integer_constant  # noqa: E402

logging.getLogger("nncf").setLevel(logging.ERROR)

SYMMETRIC = ["int8", "int4", "int4-g128", "int4-g64", "int4-g32"]
FORMATS = [
    *SYMMETRIC,
    *[
        "uint4",
        "uint4-g128",
        "uint4-g64",
        "uint4-g32",
        "nf4",
        "nf4-g128",
        "nf4-g64",
        "nf4-g32",
    ],
]
MORE_GROUPS = [
    "int4-g128",
    "int4-g64",
    "uint4-g128",
    "uint4-g64",
    "nf4",
    "nf4-g128",
    "nf4-g64",
]
# From 10,000 weights on, NNCF computes with an OpenVINO graph instead of numpy: have both.
SHAPES = [(1, 128), (8, 128), (96, 384), (40, 256), (3, 40, 256), (300, 128)]


def awkward_matrices(seed: int) -> list[np.ndarray]:
    """Ordinary weights of many sizes, with one row for each way to go wrong."""
    random = np.random.default_rng(seed)
    matrices = []
    for shape in SHAPES:
        for size in (1.0, 1e-6, 3e3):
            w = (random.standard_normal(shape) * size).astype(np.float32)
            if shape[-2] >= 40:
                columns = shape[-1]
                w[..., 0, :] = 0
                w[..., 1, :] = 1e-41
                w[..., 2, :] = 0.3 * size
                w[..., 3, :] = -0.3 * size
                w[..., 4, :] = np.abs(w[..., 4, :])
                w[..., 5, :] = -np.abs(w[..., 5, :])
                w[..., 6, :] = random.integers(-15, 16, columns) / np.float32(
                    2
                )  # ties to even
                w[..., 6, ::32] = -8
                w[..., 7, :] = -w[..., 6, :]
                w[..., 8, ::2] = size
                w[..., 8, 1::2] = -size  # both extremes equal
                w[..., 9, :] = random.standard_normal(columns) * 10.0 ** random.integers(
                    -10, 1, columns
                )
                w[..., 10, 0] = 65504
                w[..., 11, :] = np.resize(
                    NF_BORDERS, columns
                )  # NF4's ties, and their neighbours
                w[..., 12, :] = np.nextafter(w[..., 11, :], np.float32(2))
                w[..., 13, :] = np.nextafter(w[..., 11, :], np.float32(-2))
                w[..., 11:14, ::32] = 1
            matrices.append(w)
    return matrices


def matmul_model(matrices: list[np.ndarray]) -> Any:
    inputs = []
    results = []
    for i, w in enumerate(matrices):
        x = op.parameter([*w.shape[:-2], -1, w.shape[-1]], np.float32, name=f"x{i}")
        inputs.append(x)
        results.append(
            op.result(
                op.matmul(x, op.constant(w, dtype=np.float32, name=f"w{i}"), False, True)
            )
        )
    return ov.Model(results, inputs)


def compressed(
    matrices: list[np.ndarray], fmt: Format, file: Path, **advanced: Any
) -> Any:
    """The model as NNCF writes it, saved and read back."""
    kinds = {"int8": "INT8_SYM", "int4": "INT4_SYM", "uint4": "INT4_ASYM", "nf4": "NF4"}
    mode = nncf.CompressWeightsMode[kinds[fmt.name.partition("-")[0]]]
    options: dict[str, Any] = {}
    if fmt.bits == 4:
        options = {"ratio": 1.0, "group_size": fmt.group_size or -1, "all_layers": True}
        options |= {"backup_mode": nncf.BackupMode.NONE} | advanced
    model = nncf.compress_weights(matmul_model(matrices), mode=mode, **options)
    ov.save_model(model, file, compress_to_fp16=False)
    return ov.Core().read_model(file)


def constants(model: Any) -> dict[str, Any]:
    return {
        n.get_friendly_name(): n
        for n in model.get_ops()
        if n.get_type_name() == "Constant"
    }


@pytest.mark.parametrize(
    "name",
    [slow(n) if n in MORE_GROUPS else n for n in FORMATS],
)
def test_integers_and_scales_equal_nncf(name: str, tmp_path: Path) -> None:
    fmt = get_format(name)
    matrices = awkward_matrices(seed=FORMATS.index(name))
    stored_constants = constants(compressed(matrices, fmt, tmp_path / "model.xml"))
    for i, w in enumerate(matrices):
        stored = fmt.quantize(torch.from_numpy(w))
        assert stored.scales is not None
        their_integers = stored_constants[f"w{i}"].data.tobytes()
        their_scales = stored_constants[f"w{i}/scale"].data
        assert their_scales.dtype == np.float16
        assert fmt.pack(stored).tobytes() == their_integers, (
            f"integers of {w.shape}, matrix {i}"
        )
        assert stored.scales.numpy().tobytes() == their_scales.tobytes(), (
            f"scales of {w.shape}, matrix {i}"
        )
        their_zero_points = b""
        if isinstance(fmt, ZeroPointFormat):
            their_zero_points = stored_constants[f"w{i}/zero_point"].data.tobytes()
            assert stored_constants[f"w{i}/zero_point"].get_element_type() == ov.Type.u4
            assert fmt.pack_zero_points(stored).tobytes() == their_zero_points, (
                f"zero points, matrix {i}"
            )
        assert len(their_integers) + their_scales.nbytes + len(
            their_zero_points
        ) == fmt.bytes(w.shape)


def test_mxfp4_has_nncf_s_values() -> None:
    """By its numpy form, for small matrices: the other adds its epsilon before dividing by 6."""
    from nncf.quantization.algorithms.weight_compression.config import (
        WeightCompressionConfig,
    )
    from nncf.quantization.algorithms.weight_compression.weight_lowering import (
        do_float_quantization,
    )
    from nncf.tensor import Tensor

    config = WeightCompressionConfig(nncf.CompressWeightsMode.MXFP4, group_size=32)
    fmt = get_format("mxfp4")
    for w in awkward_matrices(seed=3):
        w = w.reshape(-1, w.shape[-1]).clip(
            -49152, 49152
        )  # beyond, ours saturates and NNCF's is infinite in FP16
        for part in np.array_split(w, w.size // 8000 + 1):
            reference = do_float_quantization(Tensor(part), config, reduction_axes=1)
            values = (reference.tensor * reference.scale).data.reshape(part.shape)
            assert np.array_equal(values, fmt.roundtrip(torch.from_numpy(part)).numpy())


@pytest.mark.parametrize(
    "name",
    [*(n for n in FORMATS if n not in MORE_GROUPS), "int8-g128", "uint2-g64", "mxfp4"],
)
def test_openvino_computes_with_our_values(name: str, tmp_path: Path) -> None:
    """A saved file shows the weights that the plugin uses, multiplied and looked up: (q − z) · fp16(s), exactly.

    With its default on ARM, half-precision execution, the plugin rounds that product to FP16.
    """
    fmt = get_format(name)
    w = torch.from_numpy(awkward_matrices(seed=5)[2 * 3])
    stored = fmt.quantize(w)
    weight = integer_constant(stored, fmt, "w")[0]
    x = op.parameter([-1, w.shape[-1]], np.float32)
    ids = op.parameter([-1], np.int64)
    ends = [
        op.matmul(x, weight, False, True),
        op.gather(weight, ids, op.constant(np.int64(0))),
    ]
    ov.save_model(
        ov.Model([op.result(end) for end in ends], [x, ids]), tmp_path / "m.xml"
    )
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    compiled = ov.Core().compile_model(tmp_path / "m.xml", "CPU", exact)
    outputs = compiled([np.eye(w.shape[-1], dtype=np.float32), np.arange(len(w))])
    for values in (outputs[0].T, outputs[1]):
        assert np.array_equal(values, fmt.dequantize(stored).numpy())
