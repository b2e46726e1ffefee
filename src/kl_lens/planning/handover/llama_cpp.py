"""llama.cpp: a file for `llama-quantize --tensor-type-file`, and the importance matrix for `--imatrix`.

The matrix has only the tensors whose recipe learns. So `llama-quantize` rounds the others plainly, as they were
measured.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import torch

from kl_lens.base.errors import PlanError, UnlearntError
from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.model import LoadedModel
from kl_lens.run.records import Plan
from kl_lens.targets.gguf.architectures import get_architecture
from kl_lens.targets.gguf.choices import FLOAT32, TensorJob, choose_recipes, decide
from kl_lens.targets.gguf.export import source_of
from kl_lens.weights.formats import FP16
from kl_lens.weights.formats.ggml import gguf_module
from kl_lens.weights.quantizers.importance import column_importance

TYPES, IMPORTANCE = "tensor-types.txt", "imatrix.gguf"
_SPELLED = {FP16: "f16", FLOAT32: "f32"}
# Parts of names that `llama-quantize` never quantizes.
_KEPT = ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d", "shortconv.conv.weight")


def write(model: LoadedModel, plan: Plan, folder: Path, statistics: StoredStatistics | None) -> str:
    """Returns the command to use."""
    jobs = _jobs(model, plan)
    # Names are regular expressions that are searched for: without ^ and $, `output` would also match `ffn_output`.
    lines = (f"^{re.escape(job.rule.name)}$={_SPELLED.get(job.format, job.format)}\n" for job in jobs)
    (folder / TYPES).write_text("".join(lines), encoding="utf-8")
    learning = [
        job
        for job in jobs
        if job.recipe and (job.recipe.quantizer.learns or (job.recipe.is_tuned and statistics is not None))
    ]
    if learning:
        if statistics is None:
            raise UnlearntError(
                f"plan {plan.name}: {learning[0].component}: {learning[0].recipe} needs an importance matrix, and the "
                "run has no statistics; gather them with kl-lens calibrate"
            )
        model.weights.learnt_by((job.recipe for job in learning if job.recipe), plan.statistics)
        _write_importance(folder / IMPORTANCE, learning, statistics, model.chain.device)
    sizes = Counter[str]()
    for job in jobs:
        if job.format not in _SPELLED:
            sizes[job.format] += job.bytes
    most = sizes.most_common(1)[0][0].upper() if sizes else "F16"
    weighed = f"--imatrix FOLDER/{IMPORTANCE} " if learning else ""
    return f"llama-quantize {weighed}--tensor-type-file FOLDER/{TYPES} MODEL-F16.gguf MODEL-{plan.name}.gguf {most}"


def _jobs(model: LoadedModel, plan: Plan) -> list[TensorJob]:
    """The matrices of the GGUF file whose type `llama-quantize` chooses."""
    architecture = get_architecture(model.config.model_type)
    architecture.require(model.config)
    with source_of(model) as source:
        recipes, shapes = choose_recipes(plan, source.tensors), source.tensors.shapes
    rules = architecture.tensors(model.config, shapes)
    jobs = [decide(rule, shapes, recipes, fallback=False) for rule in rules]
    chosen = []
    for job in jobs:
        if any(part in job.rule.name for part in _KEPT):
            if job.format not in _SPELLED:
                raise PlanError(
                    f"llama.cpp cannot express plan {plan.name}: {job.component}: llama-quantize never quantizes "
                    f"{job.rule.name}; give it fp16 in the plan's file"
                )
        elif len(job.shape) >= 2 and job.rule.name.endswith("weight"):
            chosen.append(job)
    return chosen


def _write_importance(
    path: Path, jobs: list[TensorJob], statistics: StoredStatistics, device: torch.device
) -> None:
    """In the format of `llama-imatrix`: for each tensor the sum of x² per column and the number of inputs."""
    text = statistics.identity["text"]
    writer = gguf_module().GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", [str(text["source"])])
    writer.add_uint32("imatrix.chunk_count", int(text["windows"]))
    writer.add_uint32("imatrix.chunk_size", int(text["length"]))
    for job in jobs:
        found = statistics.of(job.component, device)
        moments = found.second_moments
        matrices = moments[None] if moments.dim() == 2 else moments  # one, or one per expert
        importance = torch.stack([column_importance(each) for each in matrices]).cpu()
        if job.rule.columns != (1, 1):
            importance = importance.unflatten(-1, (*job.rule.columns, -1)).transpose(-3, -2).flatten(-3)
        counts = torch.tensor(found.tokens, dtype=torch.float32).clamp_min(1).expand(len(matrices))[:, None]
        writer.add_tensor(f"{job.rule.name}.in_sum2", (importance * counts).float().numpy())
        writer.add_tensor(f"{job.rule.name}.counts", counts.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
