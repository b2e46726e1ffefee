"""An IR taken apart: every stored weight with its decompression, beside the parameter that it should be."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import torch
from torch.nn.functional import cosine_similarity

from kl_lens.base.errors import TargetError, last_line
from kl_lens.run.records import Artifact
from kl_lens.targets import dissection, quarantine
from kl_lens.targets.abilities import Contents
from kl_lens.targets.dissection import (
    Disagreement,
    Dissection,
    Part,
    StoredTensor,
    Texts,
    setting,
)
from kl_lens.targets.exporting import earlier_artifact
from kl_lens.targets.openvino import session
from kl_lens.targets.openvino.constants import raw_bytes
from kl_lens.targets.openvino.convert import FEW, differences
from kl_lens.targets.openvino.folder import (
    ACTIVATION_GROUPS,
    DETOKENIZER_FILE,
    IR_FILE,
    TOKENIZER_FILE,
)
from kl_lens.targets.openvino.rewrites import is_constant, operations
from kl_lens.targets.openvino.session import open_foreign, read_graph
from kl_lens.targets.session import Session, SessionSettings
from kl_lens.targets.tokenizer import default_template
from kl_lens.weights.formats import Format, get_format
from kl_lens.weights.formats.integer import SignedScaleFormat, ZeroPointFormat

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel

_ALIKE = 0.5  # correlation of a constant without a name and its parameter
_SHAPING = ("Reshape", "Transpose", "Squeeze", "Unsqueeze")
_BITS = {"u2": 2, "i4": 4, "u4": 4, "i8": 8, "u8": 8}
_PACKED = (*_BITS, "nf4", "f4e2m1")
_EXPONENTS = "f8e8m0"  # scales alone
_FLOATS = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}
_NUMBERS = (*_PACKED, *_FLOATS, _EXPONENTS)
_EPSILONS = 1e-9, 1e-2  # what a norm adds lies between


def _size(node: Any) -> int:
    return math.prod(node.get_output_shape(0))


def _kind(node: Any) -> str:
    """The type of its numbers."""
    return str(node.get_element_type().get_type_name())


def _readers(value: Any) -> list[Any]:
    return [reader.get_node() for reader in value.get_target_inputs()]


def _correlation(values: torch.Tensor, parameter: torch.Tensor) -> float:
    return abs(float(cosine_similarity(values, parameter.flatten().float(), 0)))


class OpenVINODissection(Dissection):
    def __init__(self, path: Path) -> None:
        self.path = path if path.suffix == ".xml" else path / IR_FILE
        bare = (self.path, self.path.with_suffix(".bin"))
        self.files = tuple(file for file in bare if file.is_file())
        if self.path not in self.files:
            raise TargetError(f"{self.path}: no such file")
        quarantine.require_opens(try_out, self.path, self.files, "OpenVINO")
        record = earlier_artifact(self.path.parent)
        self._exported = record is not None and record.target == "openvino"
        self._graph = read_graph(self.path)
        self.usual_settings = not self._graph.has_rt_info(ACTIVATION_GROUPS)
        self._ends = dict(_weights(self._graph))
        self.tensors = tuple(_stored(name, end) for name, end in self._ends.items())

    def parts(self, model: LoadedModel) -> list[Part]:
        """Weights by their names; what has lost its name by its values."""
        named_parameters = model.model.named_parameters()
        parameters = {n: p.detach() for n, p in named_parameters if p.numel() > 1}
        named = list[tuple[str, StoredTensor]]()
        nameless = []
        for tensor in self.tensors:
            inside = [name for name in parameters if name in tensor.name]
            if inside:
                named.append((max(inside, key=len), tensor))
            else:
                nameless.append((tensor, tensor.read().flatten()))
        absent = [name for name in parameters if name not in dict(named)]
        pairs = [
            (_correlation(values, parameters[name]), name, tensor)
            for name in absent
            for tensor, values in nameless
            if parameters[name].numel() == values.numel()
        ]
        for correlation, name, tensor in sorted(pairs, key=lambda pair: -pair[0]):
            is_free = all(name != n and tensor != t for n, t in named)
            if correlation > _ALIKE and is_free:
                named.append((name, tensor))
        kinds = dict[str, list[tuple[str, StoredTensor]]]()
        parts = []
        for name, tensor in named:  # in_proj of all blocks
            if math.prod(tensor.shape) == parameters[name].numel():
                kinds.setdefault(re.sub(r"\d+", "", name), []).append((name, tensor))
            else:
                parts.append(Part(tensor.name, tensor, name))
        for members in kinds.values():
            fitting = [
                (parameters[n], t.shape, t.read, self._is_turned(t, parameters[n]))
                for n, t in members
            ]
            arranging = dissection.arrangements(fitting)
            parts += [
                Part(t.name, t, n, arrange)
                for (n, t), arrange in zip(members, arranging, strict=True)
            ]
        return parts

    def _is_turned(self, tensor: StoredTensor, parameter: torch.Tensor) -> bool:
        shape = tuple(parameter.shape)
        plain = tuple(size for size in tensor.shape if size > 1)
        if len(shape) != 2 or shape[0] != shape[1]:
            return len(shape) == 2 and plain == shape[::-1]
        return _is_input_major(self._ends[tensor.name])

    def settings(self, model: LoadedModel) -> list[Disagreement]:
        """The epsilons of norms are constants of the graph; other settings leave no trace that could be compared."""
        config = model.config.to_dict()
        values = {v for k, v in config.items() if "eps" in k and isinstance(v, float)}
        wanted = sorted(values)
        expected = wanted[0] if len(wanted) == 1 else wanted
        remedy = "convert it with the original's config.json"
        return [
            setting("the epsilon of a norm", value, expected, remedy)
            for value in sorted(set(_epsilons(self._graph)))
            if wanted and not any(dissection.same(value, epsilon) for epsilon in wanted)
        ]

    def tokenizer(self, model: LoadedModel) -> Iterator[Disagreement]:
        yield from super().tokenizer(model)
        graphs = self.folder / TOKENIZER_FILE, self.folder / DETOKENIZER_FILE
        present = (
            all(graph.is_file() for graph in graphs)
            and find_spec("openvino_tokenizers") is not None
        )
        if model.tokenizer is None or not present:
            return
        import openvino_tokenizers  # noqa: F401 - registers its operations

        again = f"make {TOKENIZER_FILE} again with openvino_tokenizers"
        try:
            graph = ov.Core().read_model(graphs[0])
            sentences = differences(model.tokenizer, *graphs)
        except RuntimeError as error:
            graph = None
            sentences = [f"cannot be run: {last_line(error)}"]
        if graph is None or len(sentences) > FEW:
            words = f"{TOKENIZER_FILE} {sentences[0]}"
            yield Disagreement("tokenizer", words, again, about=dissection.VOCABULARY)
        if graph is not None and graph.has_rt_info("chat_template"):
            stored = Texts(template=graph.get_rt_info("chat_template").astype(str))
            expected = Texts(template=default_template(model.tokenizer.chat_template))
            again += ": it holds a chat template too"
            yield from dissection.other_texts(stored, expected, lambda *_: again)

    def open(self, settings: SessionSettings) -> Session:
        if not self._exported:
            return open_foreign(self.path, settings)
        if self.changed():
            quarantine.require_opens(session.try_out, self.folder, self.files, "OpenVINO")
        return session.open_session(self.folder, settings)


def try_out(path: Path) -> None:
    """In a separate process: reading a graph from elsewhere may crash."""
    for _, end in _weights(read_graph(path)):
        _stored("", end)


def _weights(graph: Any) -> Iterator[tuple[str, Any]]:
    """(name of the constant, the value that the graph computes with) of everything that may be a weight."""
    ends: dict[tuple[str, int], tuple[Any, Any]] = {}
    for node in operations(graph, "Constant"):
        if _kind(node) not in (*_PACKED, *_FLOATS) or _size(node) < 2:
            continue
        end = _end(node.output(0))
        key = end.get_node().get_friendly_name(), end.get_index()
        earlier = ends.get(key)
        # Its scales and zero points lead to the same end; the weight is the largest.
        if earlier is None or _size(node) > _size(earlier[0]):
            ends[key] = node, end
    for node, end in ends.values():
        yield node.get_friendly_name(), end


def _end(value: Any) -> Any:
    """Follows a constant through its decompression: as long as nothing but constants is mixed in."""
    while True:
        readers = _readers(value)
        if len({node.get_friendly_name() for node in readers}) != 1:
            return value
        onward = readers[0]
        if onward.get_type_name() not in (*_SHAPING, "Convert", "Multiply", "Subtract"):
            return value
        if not is_constant(onward) or _kind(onward) not in _FLOATS:
            return value
        value = onward.output(0)


def _stored(name: str, end: Any) -> StoredTensor:
    constants = [n for n in _constants(end.get_node()) if _kind(n) in _NUMBERS]
    weight = max(constants, key=_size)
    kind = _kind(weight)
    size = sum(raw_bytes(node).nbytes for node in constants)
    shape = tuple(end.get_shape())
    fmt = _format(weight, map(_kind, constants), shape)
    known = dissection.known_name(_FLOATS.get(kind) or (fmt.name if fmt else ""))
    label = f"{kind} g{fmt.group_size}" if fmt and fmt.group_size else kind

    def read() -> torch.Tensor:
        values = np.array(_value(end.get_node()), np.float32)
        return torch.from_numpy(values).reshape(shape)

    return StoredTensor(name, label, shape, size, read, known, fmt)


def _format(weight: Any, kinds: Iterable[str], end: Sequence[int]) -> Format | None:
    """The format of a compressed weight. With groups, what is stored has an axis more than what is computed with
    (`end`) or, where the converter reshapes that, a shorter last one."""
    kind = _kind(weight)
    if _EXPONENTS in kinds:
        return get_format("mxfp4") if kind == "f4e2m1" else None
    if kind not in _BITS:
        return None
    shape = list(weight.get_output_shape(0))
    is_cut = len(shape) > 2 and shape[-1] != end[-1]
    group = shape[-1] if is_cut or len(shape) > len(end) else None
    signed = not kind.startswith("u")
    name = f"{'' if signed else 'u'}int{_BITS[kind]}" + (f"-g{group}" if group else "")
    make = SignedScaleFormat if signed else ZeroPointFormat
    return make(name, _BITS[kind], group)


def _constants(node: Any) -> Iterator[Any]:
    if node.get_type_name() == "Constant":
        yield node
    for value in node.input_values():
        yield from _constants(value.get_node())


def _value(node: Any) -> npt.NDArray[Any]:
    """A constant expression in float32: the plugin's own folding would round to half precision."""
    kind = node.get_type_name()
    if kind == "Constant":
        return np.asarray(node.get_data(dtype=np.float32))
    first, *operands = [_value(value.get_node()) for value in node.input_values()]
    if kind == "Multiply":
        return first * operands[0]
    if kind == "Subtract":
        return first - operands[0]
    if kind == "Transpose":
        return first.transpose(operands[0].astype(int))
    return first.reshape(tuple(node.get_output_shape(0))) if kind in _SHAPING else first


def _is_input_major(end: Any) -> bool:
    """Whether a product reads it as (in, out); PyTorch's linear layers are (out, in)."""
    return any(
        reader.get_node().get_type_name() == "MatMul"
        and reader.get_index() == 1
        and not reader.get_node().get_attributes()["transpose_b"]
        for reader in end.get_target_inputs()
    )


def _epsilons(graph: Any) -> Iterator[float]:
    """Small numbers that are added just before a root: what norms add to the mean square."""
    for node in operations(graph, "Add"):
        after = {reader.get_type_name() for reader in _readers(node.output(0))}
        if not after & {"Sqrt", "Power", "Rsqrt"}:
            continue
        for value in node.input_values():
            if is_constant(value.get_node()) and math.prod(value.get_shape()) == 1:
                number = float(_value(value.get_node()).reshape(-1)[0])
                if _EPSILONS[0] <= number <= _EPSILONS[1]:
                    yield number


def graph_contents(folder: Path, artifact: Artifact) -> Contents:
    """Which bytes a token reads: sizes from the record; states, and whether a weight is looked up, from the graph.
    Experts count whole: the exported graph multiplies with all of them."""
    graph = read_graph(folder / IR_FILE)
    sizes = {tensor.runtime_name: tensor.bytes for tensor in artifact.tensors}
    read = float(sum(sizes.values()))
    for node in operations(graph, "Constant"):
        size = sizes.get(node.get_friendly_name(), 0)
        if size and _is_looked_up(node):
            read -= size * (1 - 1 / node.get_output_shape(0)[0])  # one row
    fixed = 0
    growing = 0.0
    for variable in graph.get_variables():
        _, *shape = variable.info.data_shape
        size = math.prod(axis.get_length() for axis in shape if axis.is_static)
        if any(axis.is_dynamic for axis in shape):
            growing += 2 * size  # sessions keep keys and values in f16
        else:
            fixed += variable.info.data_type.size * size
    return Contents(read, fixed, growing)


def _is_looked_up(node: Any) -> bool:
    """Whether rows of a matrix are picked, and it is in no product."""
    users = {reader.get_type_name() for reader in _readers(_end(node.output(0)))}
    return users == {"Gather"} and len(node.get_output_shape(0)) >= 2
