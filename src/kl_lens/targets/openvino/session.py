"""Runs an exported folder: prompts of any length, token by token, and logits for evaluation."""

from __future__ import annotations

import functools
import os
import platform
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset13 as ops

from kl_lens.base.errors import TargetError, UnsupportedError, last_line
from kl_lens.base.system import processors
from kl_lens.targets import quarantine
from kl_lens.targets.exporting import read_artifact
from kl_lens.targets.openvino import scans
from kl_lens.targets.openvino.folder import graph_file
from kl_lens.targets.openvino.rewrites import HEAD_NODE, is_gated
from kl_lens.targets.session import CACHES, Logits, Session, SessionSettings

if TYPE_CHECKING:
    from kl_lens.model.images import ImageTask

IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
POSITIONS = "position_ids"
BEAM_IDX = "beam_idx"  # inputs as OpenVINO GenAI names them
ROWS = "rows"  # whose logits are wanted
TIMEOUT_VARIABLE = "KL_LENS_COMPILE_TIMEOUT"
COMPILE_TIMEOUT = "600"  # s; the iGPU compiler hangs on Mamba-2
LOGITS_CHUNK = 512  # tokens per call when all their logits are wanted

# float32 everywhere: what a comparison with PyTorch needs. Files are judged with the runtime's own defaults, which are
# lossy (keys and values in 8 bits, on some processors half precision), and with what the file says (`runtime_options`).
EXACT = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}


def open_session(folder: Path, settings: SessionSettings) -> OpenVINOSession:
    """Loads an exported folder. `exact`: compute in float32, for checks, instead of as any other program does."""
    artifact = read_artifact(folder)
    if artifact.settings.get("static_tokens"):
        raise TargetError(
            f"{folder} was exported with --static-tokens, for benchmark_app; export it without to run it here"
        )
    task = None
    if artifact.settings.get("task") == "image":
        from kl_lens.model.images import ImageTask

        task = ImageTask.of(folder, {})
    session = loaded(graph_file(folder), settings, task)
    session.description["mode"] = "exact" if settings.exact else "deployed"
    session.description["plan"] = artifact.plan
    if not settings.exact and (caches := artifact.settings.get(CACHES)):
        session.description[CACHES] = caches
    return session


def loaded(
    path: Path, settings: SessionSettings, task: ImageTask | None = None
) -> OpenVINOSession:
    """A session of one of our graphs. `task`: of a classifier."""
    graph = read_graph(path)
    if task is not None:
        session = ImageSession(graph, path.parent, settings)
        session.task = task
        return session
    _fix_sequences(graph)
    _choose_rows(graph)
    return OpenVINOSession(graph, path.parent, settings)


def open_foreign(path: Path, settings: SessionSettings) -> OpenVINOSession:
    """A session of an IR that KL Lens did not export, after a try in a separate process."""
    graph = _feedable(path)
    files = [file for file in (path, path.with_suffix(".bin")) if file.is_file()]
    quarantine.require_opens(try_out, path, files, "OpenVINO")
    return OpenVINOSession(graph, path, settings)


def try_out(path: Path) -> None:
    """For `quarantine`: opens and runs an exported folder, or a graph from elsewhere."""
    settings = SessionSettings()
    if path.is_dir():
        session = open_session(path, settings)
    else:
        session = OpenVINOSession(_feedable(path), path, settings)
    session.logits([0, 0])


def _feedable(path: Path) -> ov.Model:
    """The graph; UnsupportedError if it wants something that a language model does not get here."""
    graph = read_graph(path)
    names = {port.get_any_name() for port in graph.inputs}
    shape = graph.outputs[_logits_index(graph)].get_partial_shape()
    if odd := sorted(names - {IDS, ATTENTION_MASK, POSITIONS, BEAM_IDX}):
        raise UnsupportedError(
            f"{path.name} has an input {odd[0]!r}, which KL Lens cannot feed"
        )
    if IDS not in names or len(shape) != 3 or not shape[2].is_static:
        raise UnsupportedError(
            f"{path.name} is not a language model: expected {IDS} in and logits out"
        )
    return graph


def _logits_index(graph: ov.Model | ov.CompiledModel) -> int:
    """Of its output; the first where none has that name."""
    names = [output.get_names() for output in graph.outputs]
    return next((i for i, labels in enumerate(names) if "logits" in labels), 0)


def _description(compiled: ov.CompiledModel, device: str) -> dict[str, Any]:
    """The library, the device and the plugin's settings."""
    about = {
        "library": "openvino",
        "version": ov.__version__,
        "device": device,
        "machine": platform.machine(),
    }
    with suppress(RuntimeError):  # AUTO has none
        about["full_device_name"] = str(core().get_property(device, "FULL_DEVICE_NAME"))
    for name in (*EXACT, "INFERENCE_NUM_THREADS", "LOADED_FROM_CACHE"):
        with suppress(RuntimeError):  # not of this device
            about[name.lower()] = str(compiled.get_property(name))
    return about


class OpenVINOSession(Session):
    """One sequence at a time; the states are inside the compiled model's request. It feeds the inputs that our graphs,
    optimum-intel and OpenVINO GenAI use. A graph without states reads everything again at each step."""

    def __init__(self, graph: ov.Model, path: Path, settings: SessionSettings) -> None:
        self.path = path
        compiled = compile_graph(graph, settings)
        self._description = _description(compiled, settings.device)
        self._at = _logits_index(compiled)
        *_, vocabulary = compiled.outputs[self._at].get_partial_shape()
        self.vocabulary = int(vocabulary.get_length())
        self._request: Any = compiled.create_infer_request()
        self._types = {
            port.get_any_name(): port.get_element_type().to_dtype()
            for port in graph.inputs
        }
        self._recurrent = bool(graph.get_variables())
        self._fed = list[int]()

    @property
    def description(self) -> dict[str, Any]:
        return self._description

    def reset(self) -> None:
        if self._request is None:
            raise self.closed()
        self._request.reset_state()
        self._fed = []

    def feed(self, tokens: list[int], *, every: bool) -> Logits:
        cuts = list(range(LOGITS_CHUNK, len(tokens), LOGITS_CHUNK)) if every else []
        # The first call attends to keys and values as computed; later ones, to those that are kept.
        if every and CACHES in self.description and len(tokens) > 1:
            cuts = [1, *cuts]
        return np.concatenate(
            [self._continued(part, every) for part in np.split(np.array(tokens), cuts)]
        )

    def _continued(self, tokens: npt.NDArray[np.int64], every: bool) -> Logits:
        start = len(self._fed) if self._recurrent else 0
        self._fed += tokens.tolist()
        values = {
            IDS: np.array([self._fed[start:]]),
            ATTENTION_MASK: np.ones((1, len(self._fed))),
            POSITIONS: np.arange(start, len(self._fed))[None],
            BEAM_IDX: np.zeros(1),
            ROWS: np.arange(len(tokens))[0 if every else -1 :],
        }
        inputs = {name: values[name].astype(kind) for name, kind in self._types.items()}
        return self._infer(inputs)[-len(tokens) :]

    def close(self) -> None:
        self._request = None

    def _infer(
        self, inputs: dict[str, npt.NDArray[Any]] | list[npt.NDArray[Any]]
    ) -> Logits:
        if self._request is None:
            raise self.closed()
        try:
            self._request.infer(inputs)
        except RuntimeError as error:
            raise TargetError(
                f"{self.path}: OpenVINO cannot run it: {last_line(error)}"
            ) from error
        return np.array(self._request.get_output_tensor(self._at).data[0], np.float32)


class ImageSession(OpenVINOSession):
    """Classifies one image at a time, by the ids of `kl_lens.model.images`."""

    task: ImageTask

    def logits(self, ids: Sequence[int]) -> Logits:
        return np.stack([self._infer([image[None]]) for image in self.task.inputs(ids)])

    def feed(self, tokens: list[int], *, every: bool) -> Logits:
        raise TargetError(
            f"{self.path} classifies images: there are no prompts to feed it, and no next token to ask for or to time"
        )


def _fix_sequences(graph: ov.Model) -> None:
    """Fixes the number of sequences to one. As it is on disk, for GenAI, the graph copies its states at every token."""
    parameters = {node.get_friendly_name(): node for node in graph.get_parameters()}
    scans.replace(parameters[BEAM_IDX], ops.constant(np.zeros(1, np.int32)))
    for name in (BEAM_IDX, ATTENTION_MASK):
        graph.remove_parameter(parameters[name])
    for variable in graph.get_variables():
        info = variable.get_info()
        info.data_shape = ov.PartialShape([1, *list(info.data_shape)[1:]])
        variable.update(info)
    graph.inputs[0].get_node().set_partial_shape(ov.PartialShape([1, -1]))
    graph.validate_nodes_and_infer_types()


def _choose_rows(graph: ov.Model) -> None:
    """Adds an input with the positions whose logits are wanted: a prefill wants only the last. Done on loading; the IR
    on disk gives the logits of all tokens."""
    names = (node for node in graph.get_ops() if node.get_friendly_name() == HEAD_NODE)
    if (head := next(names, None)) is None:
        raise TargetError(
            f"this IR has no node named {HEAD_NODE}; export the model again"
        )
    rows = ops.parameter(ov.PartialShape([-1]), np.int64, name=ROWS)
    rows.output(0).get_tensor().set_names({ROWS})
    chosen = ops.gather(head.input_value(0), rows, 1)
    head.input(0).replace_source_output(chosen.output(0))
    graph.add_parameters([rows])
    graph.validate_nodes_and_infer_types()


@functools.cache
def core() -> ov.Core:
    """One shared Core: each new one searches for plugins and devices again."""
    return ov.Core()


def fewest_threads(graph: ov.Model) -> int:
    """That the CPU plugin needs: in bfloat16, its default on some x86 processors, the fused kernel of gated parts
    divides by half the number of threads. With one thread it ends the process."""
    return 2 if computes_in_bfloat16() and is_gated(graph) else 1


def computes_in_bfloat16() -> bool:
    return "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


@functools.cache
def rounds_in_groups() -> bool:
    """Whether kernels round activations in groups of 32 (`profiles`) where nothing is set: a small product tells."""
    weight = ops.convert(np.ones((2, 64), np.int8), "f32") * np.ones((2, 1), np.float32)
    row = np.full((1, 64), 0.4, np.float32)
    row[0, 0] = 127  # beside it, 0.4 becomes 0
    x = ops.parameter(ov.PartialShape([-1, 64]), np.float32)
    product = ov.Model([ops.matmul(x, weight, False, True)], [x])
    result = float(core().compile_model(product, "CPU")([row])[0][0, 0])
    return abs(result - (127 + 32 * 0.4)) < 1


def read_graph(path: Path) -> ov.Model:
    """Reads a saved IR. Graphs are always compiled from files: fresh from the converter, the ARM plugin of
    2025.2 to 2026.4 runs a unary minus in integers, and rotary embeddings come out wrong."""
    try:
        return core().read_model(path)
    except RuntimeError as error:
        raise TargetError(
            f"{path} cannot be read by OpenVINO: {last_line(error)}"
        ) from error


def compile_graph(graph: ov.Model, settings: SessionSettings) -> ov.CompiledModel:
    """Compiles for a device within a time limit, with the runtime's defaults or (`exact`) in float32."""
    device = settings.device
    threads = settings.threads
    require_device(device)
    text = os.environ.get(TIMEOUT_VARIABLE) or COMPILE_TIMEOUT
    if not re.fullmatch(r"\d+(\.\d+)?", text) or not (timeout := float(text)):
        raise TargetError(
            f"{TIMEOUT_VARIABLE}={text}: expected a number of seconds, such as 1800"
        )
    properties: dict[str, Any] = dict(EXACT if settings.exact else {})
    if device != "CPU":  # other plugins do not know these two
        properties.pop("KV_CACHE_PRECISION", None)
        properties.pop("DYNAMIC_QUANTIZATION_GROUP_SIZE", None)
    elif threads is not None:
        properties["INFERENCE_NUM_THREADS"] = threads
    if device == "CPU" and (threads or processors()) < fewest_threads(graph):
        properties["INFERENCE_PRECISION_HINT"] = "f32"
    outcome: Future[ov.CompiledModel] = Future()

    def work() -> None:
        try:
            outcome.set_result(core().compile_model(graph, device, properties))
        except BaseException as error:
            outcome.set_exception(error)

    # A thread, because a compiler that hangs cannot be interrupted; as a daemon it does not keep the program alive.
    threading.Thread(target=work, daemon=True, name="openvino-compile").start()
    try:
        return outcome.result(timeout)
    except TimeoutError as error:
        raise TargetError(
            f"compiling for {device} took more than {timeout:g} s and was stopped (Mamba-2 is known to hang the "
            f"iGPU compiler); set {TIMEOUT_VARIABLE} to more seconds"
        ) from error
    except Exception as error:
        raise TargetError(
            f"OpenVINO cannot compile for {device}: {last_line(error)}"
        ) from error


def require_device(device: str) -> None:
    """Raises TargetError, with the list of devices, if OpenVINO does not find this one."""
    present = core().available_devices
    families = {name.split(".")[0] for name in (*present, "AUTO")}
    if device.split(".")[0].split(":")[0] not in families:
        raise TargetError(
            f"OpenVINO finds no device {device!r} here; it finds {', '.join(present)}"
        )
