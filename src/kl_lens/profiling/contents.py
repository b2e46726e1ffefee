"""What one token has to read, found in the files themselves.

Bytes and formats are those on disk. A runtime that expands weights on loading reads more; then it reaches a smaller
share of the bound, and rightly so.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_lens.errors import TargetError
from kl_lens.records import Artifact
from kl_lens.targets import read_artifact

if TYPE_CHECKING:  # needs the extra gguf
    from kl_lens.targets.gguf.header import FileInfo

BODY, HEAD, LOOKUP = "body", "head", "lookup"
FLOATS = ("fp16", "fp32", "f16", "f32", "bf16")


@dataclass(frozen=True)
class StoredWeight:
    """One tensor of an artifact."""

    name: str
    bytes: int
    parameters: int
    role: str  # body: multiplied for every token; head: behind the last alone; lookup: rows are picked
    share: float = 1.0  # of it that one token reads


@dataclass(frozen=True)
class Contents:
    """Weights, and the memory of a sequence."""

    weights: tuple[StoredWeight, ...]
    state_bytes: int  # of a fixed size: convolutions and states
    kv_bytes_per_position: float  # what attention reads for every earlier token

    @property
    def weight_bytes_per_token(self) -> float:
        return math.fsum(w.bytes * w.share for w in self.weights)

    @property
    def body_parameters(self) -> float:
        return math.fsum(w.parameters * w.share for w in self.weights if w.role == BODY)

    @property
    def head_parameters(self) -> float:
        return math.fsum(w.parameters * w.share for w in self.weights if w.role == HEAD)

    def bytes_per_token(self, context: float) -> float:
        return self.weight_bytes_per_token + self.state_bytes + self.kv_bytes_per_position * context


def read_contents(path: Path) -> Contents:
    """Of an exported folder, or of a .gguf file from anywhere."""
    if path.suffix == ".gguf":
        return gguf_contents(path)
    artifact = read_artifact(path)
    if artifact.target == "gguf":
        return gguf_contents(path / next(name for name in artifact.files if name.endswith(".gguf")))
    return openvino_contents(path, artifact)


# -- GGUF ----------------------------------------------------------------------------------------------


def gguf_contents(path: Path) -> Contents:
    """By llama.cpp's tensor names; its states are F32, its keys and values F16 unless it is told otherwise."""
    from kl_lens.targets.gguf.header import check_file

    info = check_file(path)
    prefix = info.architecture
    shapes = {entry.name: entry.shape for entry in info.tensors}
    expert_share = _expert_share(info)
    untied = "output.weight" in shapes
    weights = []
    for entry in info.tensors:
        role, share = BODY, 1.0
        if entry.name == "output.weight" or (entry.name == "token_embd.weight" and not untied):
            role = HEAD
        elif entry.name == "token_embd.weight":
            role, share = LOOKUP, 1 / entry.shape[0]
        elif "_exps." in entry.name:
            share = expert_share
        weights.append(StoredWeight(entry.name, entry.bytes, math.prod(entry.shape), role, share))
    inner = info.metadata.get(f"{prefix}.ssm.inner_size", 0)
    state = info.metadata.get(f"{prefix}.ssm.state_size", 0)
    fixed, growing = 0, 0
    for name, shape in shapes.items():
        if name.endswith(".ssm_conv1d.weight"):
            channels, kernel = shape[0], shape[-1]
            fixed += 4 * (inner * state + channels * (kernel - 1))
        elif re.search(r"\.attn_[kv]\.weight$", name):
            growing += 2 * shape[0]
        elif name.endswith(".attn_qkv.weight"):
            growing += 2 * (shape[0] - info.metadata.get(f"{prefix}.embedding_length", 0))
    return Contents(tuple(weights), fixed, growing)


def _expert_share(info: FileInfo) -> float:
    experts = info.metadata.get(f"{info.architecture}.expert_count") or 0
    chosen = info.metadata.get(f"{info.architecture}.expert_used_count") or experts
    return chosen / experts if experts else 1.0


def expert_share(path: Path) -> float:
    """The part of its experts that one token reads in llama.cpp; 1 for a model without."""
    from kl_lens.targets.gguf.header import check_file

    file = path if path.suffix == ".gguf" else next(path.glob("*.gguf"))
    return _expert_share(check_file(file))


# -- OpenVINO ------------------------------------------------------------------------------------------

# Operations between a stored constant and what uses it; the product with its scale is the other one.
_PASSING = ("Convert", "Reshape", "Transpose", "Unsqueeze", "Squeeze")
_HEAD_NODE = "lm_head"


def openvino_contents(folder: Path, artifact: Artifact) -> Contents:
    """Bytes from the record; what is multiplied, what only looked up, and the states from the graph.

    Experts are read whole: the exported graph multiplies with all of them and drops what the router did not choose.
    """
    from kl_lens.targets.openvino.session import read_graph

    graph = read_graph(folder / next(name for name in artifact.files if name.endswith(".xml")))
    constants = {n.get_friendly_name(): n for n in graph.get_ops() if n.get_type_name() == "Constant"}
    weights, seen = [], set()
    for tensor in artifact.tensors:
        if tensor.runtime_name in seen:
            continue
        seen.add(tensor.runtime_name)
        node = constants.get(tensor.runtime_name)
        if node is None:  # inside a loop's body
            weights.append(StoredWeight(tensor.runtime_name, tensor.bytes, 0, BODY))
            continue
        shape = tuple(node.get_output_shape(0))
        users = _users(node)
        role, share = BODY, 1.0
        if any(name == _HEAD_NODE for _, name in users):
            role = HEAD
        elif users and all(kind == "Gather" for kind, _ in users) and len(shape) >= 2:
            role, share = LOOKUP, 1 / shape[0]
        weights.append(StoredWeight(tensor.runtime_name, tensor.bytes, math.prod(shape), role, share))
    fixed, growing = 0, 0.0
    for variable in graph.get_variables():
        shape = variable.info.data_shape
        sizes = [d.get_length() if d.is_static else None for d in shape]
        size = math.prod(s for s in sizes if s is not None)
        if None in sizes[1:]:
            growing += 2 * size  # sessions keep keys and values in f16
        else:
            fixed += variable.info.data_type.size * size
    return Contents(tuple(weights), fixed, growing)


def _users(node: Any) -> set[tuple[str, str]]:
    """(type, name) of the operations that a constant ends up in."""
    found = set()
    scaled = f"{node.get_friendly_name()}/scaled"
    waiting = [node]
    while waiting:
        for reader in waiting.pop().output(0).get_target_inputs():
            user = reader.get_node()
            if user.get_type_name() in _PASSING or user.get_friendly_name() == scaled:
                waiting.append(user)
            else:
                found.add((user.get_type_name(), user.get_friendly_name()))
    return found


def all_floating(path: Path) -> bool:
    """True when nothing in the artifact is quantized: it can stand for FP16."""
    if path.suffix != ".gguf":
        return all(tensor.realised.lower() in FLOATS for tensor in read_artifact(path).tensors)
    from kl_lens.targets.gguf.header import check_file

    return all(entry.type.lower() in FLOATS for entry in check_file(path).tensors)


def check_size(path: Path, artifact: Artifact) -> int:
    """Bytes of the weights' file, which must be those of the record."""
    suffix = ".bin" if artifact.target == "openvino" else ".gguf"
    file = path / next(name for name in artifact.files if name.endswith(suffix))
    size = file.stat().st_size
    if size != artifact.realised_bytes:
        raise TargetError(
            f"{file} holds {size} bytes and its record says {artifact.realised_bytes}; export the model again"
        )
    return size
