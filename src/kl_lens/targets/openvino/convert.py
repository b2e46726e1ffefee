"""Exports a plan: the model as IR, the tokenizer and the configuration."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch
import transformers

from kl_lens.base.errors import TargetError, one_line
from kl_lens.model import LoadedModel
from kl_lens.run.records import Artifact, Plan
from kl_lens.targets.abilities import Target
from kl_lens.targets.exporting import Choice, choices, record, write_beside
from kl_lens.targets.openvino import constants, rewrites
from kl_lens.targets.openvino.folder import (
    ACTIVATION_GROUPS,
    DETOKENIZER_FILE,
    IR_FILE,
    TOKENIZER_FILE,
)
from kl_lens.targets.openvino.graph import graph_of, image_graph_of, on_cpu
from kl_lens.targets.openvino.kernels import expanded
from kl_lens.targets.openvino.session import read_graph
from kl_lens.targets.tokenizer import other_ids, varied_strings
from kl_lens.weights.recipes import FP16

# Activations that share a scale; "row" is 2^64 − 1.
GROUP_SIZES = {"0": "0", "32": "32", "64": "64", "128": "128", "row": f"{2**64 - 1}"}
_CACHES = {"keys": "KEY", "values": "VALUE"}  # in names of OpenVINO's settings


@dataclass(frozen=True)
class Options:
    """Settings of an export."""

    # A forward of exactly this many tokens without state, instead of the stateful graph.
    static_tokens: int | None = None
    # False makes a static graph end in the last hidden states.
    with_head: bool = True
    # A runtime option of the file, of GROUP_SIZES; None: the runtime's default.
    activation_groups: str | None = None
    unplanned: str = FP16  # or fp32, for a graph that is to be compared with PyTorch
    # Write the tokenizer's files too; not needed to find out how large the model will be.
    with_tokenizer: bool = True

    def check(self, model: LoadedModel) -> None:
        """Raises TargetError for settings that make no sense."""
        tokens = self.static_tokens
        if self.activation_groups not in (None, *GROUP_SIZES):
            raise TargetError(
                f"--activation-groups {self.activation_groups}: expected one of {', '.join(GROUP_SIZES)}"
            )
        if model.classifier is not None and not (tokens is None and self.with_head):
            raise TargetError(
                "--static-tokens and --without-head are for language models, not for images"
            )
        if tokens is None and not self.with_head:
            raise TargetError(
                "a graph without its head makes sense only with --static-tokens N"
            )
        if tokens is not None and tokens < 1:
            raise TargetError(f"--static-tokens has to be at least 1, not {tokens}")


def export(
    target: Target, model: LoadedModel, plan: Plan, folder: Path, options: Options
) -> Artifact:
    """Writes the model, the tokenizer and the configuration to a folder."""
    options.check(model)
    model.require_memory("exporting to OpenVINO")
    chosen = choices(model, plan, target.fit)

    # The model as a float32 graph, and where its weights are.
    module = on_cpu(model.model)
    task = model.classifier
    if task:
        graph = image_graph_of(module, task)
    else:
        graph = graph_of(module, options.static_tokens, with_head=options.with_head)
    rewrites.weights_on_the_right(graph)
    if options.with_head:
        rewrites.name_head(graph)
    nodes = constants.map_weights(
        graph,
        module,
        model.anatomy,
        without_head=not options.with_head,
        may_fold=task is not None,
    )
    placed = constants.place_weights(
        nodes, model.weights, model.anatomy.components, chosen, options.unplanned
    )
    folder.mkdir(parents=True, exist_ok=True)
    versions = {
        module.__name__: module.__version__ for module in (ov, torch, transformers)
    }
    settings = asdict(options) | {"versions": versions}
    if task:
        settings["task"] = task.name
    rewrites.apply(graph)
    for name, value in _runtime_options(plan, options.activation_groups).items():
        graph.set_rt_info(value, ["runtime_options", name])
    _save(graph, folder / IR_FILE)
    del graph
    constants.check_saved(read_graph(folder / IR_FILE), placed)
    model.config.save_pretrained(folder)
    notes = write_beside(model, folder, with_tokenizer=options.with_tokenizer)
    if task:
        task.processor.save_pretrained(folder)
    elif options.with_tokenizer and options.static_tokens is None:
        notes += filter(None, [write_tokenizer(model.tokenizer, folder)])
    if notes := notes + _slow_formats(chosen):
        settings["notes"] = notes
    return record("openvino", model, plan, folder, placed, **settings)


def _runtime_options(plan: Plan, activation_groups: str | None) -> dict[str, str]:
    """OpenVINO reads them from the file, whichever program opens it."""
    options = {}
    if activation_groups is not None:
        options[ACTIVATION_GROUPS[1]] = GROUP_SIZES[activation_groups]
    for kind, name in plan.caches.items():
        number, _, group = name.replace(FP16, "f16").partition("-")
        options[f"{_CACHES[kind]}_CACHE_PRECISION"] = number
        options[f"{_CACHES[kind]}_CACHE_GROUP_SIZE"] = group or "0"
    return options


def _slow_formats(chosen: Mapping[str, Choice]) -> list[str]:
    """A note if this processor does not multiply with some formats as they are stored."""
    names = {choice.recipe.grid.name for choice in chosen.values()}
    slow = " and ".join(sorted(names.intersection(expanded())))
    note = (
        f"on this processor OpenVINO expands {slow} to floats when it loads the file: right results, but neither less "
        "memory nor more speed; on x86-64 they run as stored"
    )
    return [note] if slow else []


def _save(graph: ov.Model, path: Path) -> None:
    rewrites.number_names(graph)
    try:
        ov.save_model(graph, path, compress_to_fp16=False)
    except RuntimeError as error:  # OpenVINO does not give the reason
        free = shutil.disk_usage(path.parent).free / 1e6
        raise TargetError(
            f"{path.parent.parent}: OpenVINO cannot write; {free:.1f} MB are free"
        ) from error


CHECKED_STRINGS = 300
FEW = 3  # strings or tokens that differ: a tokenizer is written in spite of them, and a note names the first


def write_tokenizer(tokenizer: Any | None, folder: Path) -> str | None:
    """Writes tokenizer and detokenizer as IR, for OpenVINO GenAI. Returns None, or a note: why there are none, or how
    they differ. The converted tokenizer is compared with transformers on a few hundred strings. One that differs on
    more than a few is not written: a model that is fed other tokens answers badly, and nothing would say why."""
    missing = f"no {TOKENIZER_FILE} was written, so OpenVINO GenAI cannot open this folder (kl-lens can): "
    if tokenizer is None:
        return f"{missing}the checkpoint has no tokenizer"
    if find_spec("openvino_tokenizers") is None:
        return f"{missing}openvino-tokenizers is missing; pip install 'kl-lens[openvino]' and export again"
    files, differing = _converted(tokenizer)
    owner = tokenizer.name_or_path or "this checkpoint"
    if len(differing) > FEW or not files:
        return f"{missing}{type(tokenizer).__name__} of {owner} {differing[0]}"
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return f"{TOKENIZER_FILE} {'; it '.join(differing)}" if differing else None


@lru_cache(maxsize=1)
def _converted(tokenizer: Any) -> tuple[dict[str, bytes], list[str]]:
    """The files by name, and how they differ from the tokenizer. Kept, because a run exports many plans."""
    import openvino_tokenizers

    logging.getLogger("openvino_tokenizers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder) / TOKENIZER_FILE, Path(folder) / DETOKENIZER_FILE
        try:
            graphs = openvino_tokenizers.convert_tokenizer(
                tokenizer, with_detokenizer=True
            )
            for graph, path in zip(graphs, paths, strict=True):
                rewrites.number_names(graph)
                ov.save_model(graph, path, compress_to_fp16=False)
            differing = differences(tokenizer, *paths)
        except Exception as error:  # whatever an unknown tokenizer makes it raise
            reason = one_line(error)
            return {}, [f"cannot be converted by openvino-tokenizers ({reason})"]
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        return files, differing


def differences(tokenizer: Any, encoder: Path, decoder: Path) -> list[str]:
    """What the graphs do otherwise than the tokenizer, a sentence for each string or token, until they are too many."""
    core = ov.Core()  # a new one: only those made after importing openvino_tokenizers know its operations
    encode, decode = (core.compile_model(path, "CPU") for path in (encoder, decoder))

    def text_of(ids: list[int]) -> str:
        return str(decode([np.array([ids])])["string_output"][0]) if ids else ""

    def agrees(ids: list[int]) -> bool:
        return text_of(ids) == tokenizer.decode(ids, skip_special_tokens=True)

    sentences = dict[str, None]()
    special = sorted(set(map(str, tokenizer.get_added_vocab())))
    for text in varied_strings(CHECKED_STRINGS, special=special):
        if len(sentences) > FEW:
            break
        expected = list(tokenizer(text)["input_ids"])
        ids = [int(token) for token in encode([text])["input_ids"][0]]
        if ids != expected:
            parts = other_ids(ids, expected, tokenizer)
            sentences[f"splits text into other tokens than transformers: {parts}"] = None
        elif not agrees(ids):
            words = text
            for token in dict.fromkeys(ids):
                if agrees([i for i in ids if i != token]):  # the odd one
                    words = tokenizer.convert_ids_to_tokens(token)
                    ids = [token]
                    break
            sentences[
                f"turns the tokens of {words!r} into other text than transformers: {text_of(ids)!r}"
            ] = None
    return list(sentences)
