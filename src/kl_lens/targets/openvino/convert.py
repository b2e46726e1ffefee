"""Exports a plan: the model as IR, the tokenizer and the configuration."""

from __future__ import annotations

import platform
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch
import transformers

from kl_lens.base.environment import peak_memory
from kl_lens.base.errors import TargetError, last_line
from kl_lens.model import LoadedModel
from kl_lens.run.records import Artifact, ExportedTensor, Plan
from kl_lens.targets.openvino import constants, rewrites
from kl_lens.targets.openvino.folder import GENERATION_FILE, IR_FILE
from kl_lens.targets.openvino.graph import StaticShape, graph_of, image_graph_of, on_cpu
from kl_lens.targets.openvino.profiles import DeviceProfile, Realised, expanded, get_profile, realise
from kl_lens.targets.openvino.session import (
    HEAD_NODE,
    compile_graph,
    log_softmax,
    read_graph,
    run_graph,
)
from kl_lens.targets.openvino.tokenizer import write_tokenizer
from kl_lens.weights.recipes import FP16

UNPLANNED = (FP16, "fp32")
ACTIBA_TOKENS = 128


def export(
    model: LoadedModel,
    plan: Plan,
    folder: Path | str,
    *,
    device_profile: str = "cpu",
    rewrites: Sequence[str] | None = None,
    static_tokens: int | None = None,
    with_head: bool = True,
    fallback: bool = False,
    unplanned: str = FP16,
    with_tokenizer: bool = True,
) -> Artifact:
    """Writes the model, the tokenizer and the configuration to a folder. `Target.export` adds the record and
    moves everything into place.

    Args:
        model: the opened model, in float32.
        plan: component → format. What it does not name stays FP16.
        folder: an empty folder for the files; created if it does not exist.
        device_profile: cpu, gpu, gpu-int4 or npu.
        rewrites: cumba, reduba, actiba; None means what the profile asks for.
        static_tokens: a forward of exactly this many tokens without state, instead of the stateful graph.
        with_head: False makes the graph end in the last hidden states (static graphs only).
        fallback: where a format does not fit, use another and record it, instead of refusing.
        unplanned: fp16, or fp32 for a graph that is to be compared with PyTorch.
        with_tokenizer: write the tokenizer's files too; not needed to find out how large the model will be.

    Raises:
        TargetError: the family, plan or setting cannot be exported; the message gives the reason.
    """
    started = time.perf_counter()
    model.require_memory("exporting to OpenVINO")
    profile = get_profile(device_profile)
    static = _static_shape(model, profile, static_tokens, with_head)
    chunked = any(c.kind == "A_log" and len(c.shape) == 1 for c in model.anatomy.components)
    chosen = tuple(profile.default_rewrites(chunked) if rewrites is None else rewrites)
    if unplanned not in UNPLANNED:
        raise TargetError(f"weights outside the plan can be {' or '.join(UNPLANNED)}, not {unplanned!r}")
    if model.classifier is not None and "actiba" in chosen:
        raise TargetError("actiba is for language models, not for images")
    realised = realise(plan.assignment, model.anatomy, profile, fallback=fallback)
    learnt = model.weights.learnt_by((each.recipe for each in realised.values()), plan.statistics)

    graph, weight_map = _graph(model, static, with_head)
    placed = constants.place_weights(
        weight_map, model.weights, model.anatomy.components, realised, baseline=unplanned
    )
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    plain = graph.clone() if "actiba" in chosen else None
    settings: dict[str, Any] = {
        "device_profile": device_profile,
        "rewrites": list(chosen),
        "static_tokens": static_tokens,
        "with_head": with_head,
        "unplanned": unplanned,
        "folded_away": weight_map.folded,
        "family": model.anatomy.model_type,
        "versions": {module.__name__: module.__version__ for module in (ov, torch, transformers)},
        **({"statistics": learnt} if learnt else {}),
        **({} if model.classifier is None else {"task": model.classifier.name}),
        "rewritten": _rewrites.apply(graph, chosen),
    }
    _save(graph, place / IR_FILE)
    del graph
    if plain is not None:
        settings["actiba"] = _actiba_cost(plain, chosen, place, model, static_tokens, with_head)
    constants.check_saved(read_graph(place / IR_FILE), placed)
    notes = _write_beside(model, place, with_tokenizer=with_tokenizer, converses=static is None)
    if notes := [note for note in (*notes, _expanded_here(realised)) if note]:
        settings["notes"] = notes
    settings["export_seconds"] = round(time.perf_counter() - started, 2)
    settings["export_peak_bytes"] = peak_memory()
    return _artifact(model, plan, realised, placed, place, settings)


def _graph(
    model: LoadedModel, static: StaticShape | None, with_head: bool
) -> tuple[ov.Model, constants.WeightMap]:
    """The model as a float32 graph, and where its weights are."""
    module, task = on_cpu(model.model), model.classifier
    graph = (
        graph_of(module, static=static, with_head=with_head) if task is None else image_graph_of(module, task)
    )
    _rewrites.weights_on_the_right(graph)
    if with_head:
        _name_head(graph)
    found = constants.map_weights(
        graph, module, model.anatomy, without_head=not with_head, may_fold=task is not None
    )
    return graph, found


def _write_beside(
    model: LoadedModel, place: Path, *, with_tokenizer: bool, converses: bool
) -> list[str | None]:
    """Configuration and tokenizer; returns notes about them."""
    model.config.save_pretrained(place)
    if (generation := model.folder / GENERATION_FILE).is_file():
        shutil.copyfile(generation, place / GENERATION_FILE)
    if model.classifier is not None:
        model.classifier.preparation.write(place)
    if not with_tokenizer:
        return []
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(place)
    speaks = converses and model.classifier is None
    return [model.unread_tokens, write_tokenizer(model.tokenizer, place) if speaks else None]


_rewrites = rewrites  # `export` has an argument with that name


def _expanded_here(realised: dict[str, Realised]) -> str | None:
    names = {each.recipe.grid.name for each in realised.values()} & set(expanded(platform.machine()))
    if not names:
        return None
    return (
        f"on this processor OpenVINO expands {' and '.join(sorted(names))} to floats when it loads the file: right "
        "results, but neither less memory nor more speed; on x86-64 they run as stored"
    )


def _save(graph: ov.Model, path: Path) -> None:
    _rewrites.number_names(graph)
    try:
        ov.save_model(graph, path, compress_to_fp16=False)
    except RuntimeError as error:  # OpenVINO does not give the reason
        free = shutil.disk_usage(path.parent).free / 1e6
        raise TargetError(
            f"{path.parent.parent}: OpenVINO cannot write there ({last_line(error)}); is the disk full? "
            f"{free:.1f} MB are free"
        ) from error


def _static_shape(
    model: LoadedModel, profile: DeviceProfile, tokens: int | None, with_head: bool
) -> StaticShape | None:
    """None: a graph with state."""
    if model.classifier is not None:
        if tokens is not None or not with_head:
            raise TargetError("--static-tokens and --without-head are for language models, not for images")
        return None
    if tokens is None:
        if profile.static_only:
            raise TargetError(f"profile {profile.name} needs fixed shapes: give --static-tokens N")
        if not with_head:
            raise TargetError("a graph without its head makes sense only with --static-tokens N")
        return None
    if tokens < 1:
        raise TargetError(f"--static-tokens has to be at least 1, not {tokens}")
    return StaticShape(tokens, unroll=profile.unrolled)


def _name_head(graph: ov.Model) -> None:
    """Names the head's product, the last MatMul before the logits, so that sessions find it."""
    node = graph.get_results()[0].input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        if node.get_input_size() == 0:
            raise TargetError("no matrix product before the logits; this head is not understood")
        node = node.input_value(0).get_node()
    node.set_friendly_name(HEAD_NODE)


def _artifact(
    model: LoadedModel,
    plan: Plan,
    realised: dict[str, Realised],
    placed: dict[str, constants.Placed],
    place: Path,
    settings: dict[str, Any],
) -> Artifact:
    tensors = []
    sizes: dict[str, int] = {}  # digest → bytes: equal constants are stored once
    expected = 0
    for component in model.anatomy.components:
        item = placed.get(component.name)
        if item is None:
            continue
        choice = realised[component.name]
        expected += item.bytes
        sizes[item.digest] = item.bytes
        tensors.append(
            ExportedTensor(
                component.name,
                item.runtime_name,
                choice.planned,
                item.recipe,
                item.bytes,
                choice.reason,
                item.digest,
                item.weights,
            )
        )
    size = (place / IR_FILE).with_suffix(".bin").stat().st_size
    planned = plan.bytes if plan.bytes is not None else expected
    shared = expected - sum(sizes.values())
    settings["bytes_stored_once"] = shared
    settings["bytes_over_plan"] = (size + shared) / planned - 1
    return Artifact(
        target="openvino",
        plan=plan.name,
        files=tuple(sorted(path.name for path in place.iterdir())),
        tensors=tuple(tensors),
        planned_bytes=planned,
        realised_bytes=0,  # the target counts what its runtime loads
        model=model.name,
        model_fingerprint=model.fingerprint,
        settings=settings,
    )


def _actiba_cost(
    plain: ov.Model,
    chosen: Sequence[str],
    place: Path,
    model: LoadedModel,
    static_tokens: int | None,
    with_head: bool,
) -> dict[str, Any]:
    """The error bound of the tables and the KL per token that they cost, measured on this CPU."""
    cost: dict[str, Any] = {"error_bound": _rewrites.table_error(), "segments": _rewrites.TABLE_SEGMENTS}
    if not with_head:
        return cost
    tokens = static_tokens or ACTIBA_TOKENS
    ids = np.random.default_rng(0).integers(0, int(model.config.vocab_size), tokens).tolist()
    cost["measured_on"] = f"{tokens} random tokens"
    _rewrites.apply(plain, tuple(name for name in chosen if name != "actiba"))
    with tempfile.TemporaryDirectory() as beside:
        without = Path(beside) / "without_actiba.xml"
        _save(plain, without)
        before, after = (
            log_softmax(run_graph(compile_graph(read_graph(path), "CPU", exact=True), ids))
            for path in (without, place / IR_FILE)
        )
    cost["kl_nats_per_token"] = float((np.exp(before) * (before - after)).sum(-1).mean())
    return cost
