"""Tries every family and writes what was seen into docs/families.json: `python scripts/models.py`. Takes minutes.

Of every causal class of the installed transformers that has a recurrent, linear-attention or convolutional layer, of
Hymba, and of the transformers that people use most, a tiny random model is opened, measured by both engines, checked
against a forward in float64 that shares nothing with the engines, and exported; the file's logits are compared with
PyTorch's.
Names as arguments try only those: `python scripts/models.py lfm2 qwen3_next`. `scripts/families.py` makes tables of it.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests import families
from tests.targets.gguf import support

from kl_lens.base.errors import KLLensError, UnsupportedError, one_line
from kl_lens.measuring.engines import ENGINES
from kl_lens.measuring.perturbation import Perturbation, replacements
from kl_lens.model import LoadedModel
from kl_lens.run.readings import summarise
from kl_lens.run.records import Plan
from kl_lens.targets import export, open_session
from kl_lens.weights.recipes import Recipe

WINDOWS = 2
TOKENS = 24
AGREE = 2e-3  # relative difference of two KL
LOGITS = 1e-3  # share of the logits' range
USED_MOST = [
    "llama",
    "qwen3",
    "qwen2",
    "mistral",
    "gemma3_text",
    "phi3",
    "qwen3_moe",
    "granite",
    "olmo2",
    "smollm3",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "gemma4_text",
]
_RECURRENT = re.compile(r"causal_conv1d_fn|recurrent_state|linear_attention|lstm")
# Classes of images, sound or drafts: no language model that a text alone measures.
_NOT_TEXT = re.compile(r"Conditional|VL|Speech|Audio|Vision|Transcribe|Assistant")


def _one_group() -> transformers.PretrainedConfig:
    config = families.CONFIGS["falcon_h1"]()
    config.mamba_n_groups = 1
    return config


# Of families that a runtime runs only in part: a configuration that it runs.
_OTHER_CONFIGURATIONS = {"gguf": support.CONFIGS, "mlx": {"falcon_h1": _one_group}}
DATA = Path(__file__).resolve().parents[1] / "docs/families.json"


@dataclass
class Row:
    """What was seen of one family. An empty value is a no; `why` says why, or where a yes has its limits."""

    family: str
    kind: str = ""  # its class in transformers
    recurrent: bool = True
    blocks: int = 0  # how many were found
    engines: str = ""  # relative difference of KL: fast engine and plain one
    float64: str = ""  # the same: plain engine and float64
    openvino: str = (
        ""  # FP32 file and PyTorch: largest difference of logits, as share of their range
    )
    gguf: str = ""
    mlx: str = ""  # mlx-lm with the float32 weights
    why: dict[str, str] = field(
        default_factory=dict
    )  # openvino, gguf, mlx or measuring → one line


def recurrent_families() -> list[str]:
    """Model types of transformers' causal classes whose code has a recurrent or convolutional layer."""
    names = set()
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        cls = getattr(transformers, name if isinstance(name, str) else name[0], None)
        if cls is None or _NOT_TEXT.search(cls.__name__):
            continue
        if _RECURRENT.search(inspect.getsource(inspect.getmodule(cls))):  # type: ignore[arg-type]
            names.add(
                str(
                    getattr(getattr(cls, "config_class", None), "model_type", None)
                    or model_type
                )
            )
    return sorted(names)


def rows(chosen: list[str] | None = None) -> Iterator[Row]:
    listed = {**families.CONFIGS, **families.UNUSUAL, **families.OTHERS}
    for family in chosen or [
        *sorted(["hymba", "mamba2_groups", *recurrent_families()]),
        *USED_MOST,
    ]:
        if family in listed:
            yield tried(family)
        else:
            yield Row(
                family,
                why={"measuring": "not tried: tests/families.py has no tiny model of it"},
            )


def tried(family: str) -> Row:
    row = Row(family, recurrent=family not in USED_MOST)
    try:
        bare = families.tiny_model(family)
        if getattr(bare.config, "rescale_every", 0):
            bare.config.rescale_every = 0  # as `load` does in float32
    except Exception as error:
        row.why["measuring"] = f"transformers cannot make it: {one_line(error)}"
        return row
    row.kind = type(bare).__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    model = LoadedModel(family, Path(), bare, None)
    ids = families.token_ids(WINDOWS, TOKENS)
    try:
        row.blocks = len(model.chain)
        doubt = model.chain.doubt(ids)
        _measure(row, model, ids, plain_only=doubt is not None)
        if doubt:
            row.why["measuring"] = doubt
    except KLLensError as error:
        row.blocks = 0
        row.why["measuring"] = one_line(error)
        return row
    except Exception as error:
        row.why["measuring"] = f"**fails**: {type(error).__name__}: {one_line(error)}"
        return row
    for target in ("openvino", "gguf", "mlx"):
        try:
            try:
                parity = _parity(target, model, ids[:1])
            except UnsupportedError as error:
                if family not in (variants := _OTHER_CONFIGURATIONS.get(target, {})):
                    raise
                # Some configurations of the family have no such file, and others have.
                row.why[target] = (
                    _short(error, family)
                    if target == "mlx"
                    else one_line(error).partition(": ")[2]
                )
                parity = _parity(target, support.tiny(variants[family]()), ids[:1])
            setattr(row, target, parity)
        except KLLensError as error:
            row.why[target] = _short(error, family)
        except Exception as error:
            row.why[target] = f"**fails**: {type(error).__name__}: {one_line(error)}"
    return row


def _short(error: KLLensError, family: str) -> str:
    """Without the name of the family and without what differs from run to run."""
    text = (
        one_line(error)
        .removeprefix(f"{family} cannot be exported to OpenVINO: ")
        .partition(" (KL ")[0]
    )
    text = re.sub(
        r"OpenVINO [\d.]+-\S+ cannot",
        "OpenVINO cannot",
        text.partition(": give llama.cpp's")[0],
    )
    return re.sub(r"; without a constant: .*", "", text)


def _measure(
    row: Row, model: LoadedModel, ids: torch.Tensor, *, plain_only: bool
) -> None:
    """The first component of every kind at 4 bits: both engines, and float64."""
    first = {
        component.kind: component.name for component in reversed(model.anatomy.candidates)
    }
    perturbations = [Perturbation.single(name, Recipe("int4")) for name in first.values()]
    losses: dict[str, list[float]] = {}
    for name, engine_class in ENGINES.items():
        if plain_only and name == "fast":
            continue
        engine = engine_class(model)
        engine.prepare(ids)
        losses[name] = [
            summarise(w)["kl_teacher_to_student"].value
            for w in engine.measure(perturbations)
        ]
    exact = _float64(model, perturbations, ids)
    off = _apart(losses["plain"], exact)
    row.float64 = f"{off:.0e}" if off <= AGREE else f"**off by {off:.0e}**"
    if plain_only:
        row.engines = "plain"
    else:
        off = _apart(losses["plain"], losses["fast"])
        row.engines = f"{off:.0e}" if off <= AGREE else f"**off by {off:.0e}**"


def _apart(first: list[float], second: list[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-7) for a, b in zip(first, second, strict=True))


@torch.no_grad()
def _float64(
    model: LoadedModel, perturbations: list[Perturbation], ids: torch.Tensor
) -> list[float]:
    """KL per token between two plain forwards of a copy in float64."""
    twin = copy.deepcopy(model.model).double()
    with contextlib.suppress(
        Exception
    ):  # the grouped products of experts know no float64
        twin.set_experts_implementation("eager")
    names = {id(p): name for name, p in model.model.named_parameters()}

    def log_probabilities() -> torch.Tensor:
        return twin(input_ids=ids, use_cache=False).logits.double().log_softmax(-1)

    teacher = log_probabilities()
    losses = []
    for perturbation in perturbations:
        originals = []
        for parameter, weight in replacements(model, perturbation):
            target = twin.get_parameter(names[id(parameter)])
            originals.append((target, target.clone()))
            target.copy_(weight.double())
        losses.append(
            float((teacher.exp() * (teacher - log_probabilities())).sum(-1).mean())
        )
        for target, value in originals:
            target.copy_(value)
    return losses


def _parity(target: str, model: LoadedModel, ids: torch.Tensor) -> str:
    with torch.no_grad():
        expected = model.model(input_ids=ids, use_cache=False).logits[0].float().numpy()
    tokens = ids[0].tolist()
    if target == "mlx":
        from kl_lens.targets.mlx.layout import layout_of

        return f"{layout_of(model).difference:.0e}"
    matrices = {c.name: "fp32" for c in model.anatomy.components if len(c.shape) >= 2}
    planned, options = (
        ({}, {"unplanned": "fp32"}) if target == "openvino" else (matrices, {})
    )
    with tempfile.TemporaryDirectory() as folder:
        export(
            model,
            Plan("fp32", planned, made_by="models"),
            target,
            Path(folder) / "artifact",
            **options,
        )
        session = open_session(Path(folder) / "artifact", threads=1, exact=True)
        with contextlib.closing(session):
            whole = session.logits(tokens)
            session.reset()
            steps = np.stack([session.step(token) for token in tokens])
    off = max(
        float(np.abs(logits - expected).max()) for logits in (whole, steps)
    ) / float(np.ptp(expected))
    return f"{off:.0e}" if off <= LOGITS else f"**off by {off:.0e}**"


def write(fresh: list[Row]) -> None:
    """Puts rows into the file, in the place of earlier ones of the same families."""
    from importlib.metadata import version

    packages = ("transformers", "torch", "openvino", "xllamacpp", "mlx-lm")
    before = json.loads(DATA.read_text("utf-8"))["families"] if DATA.exists() else []
    rows = {row["family"]: row for row in before} | {
        row.family: asdict(row) for row in fresh
    }
    content = {
        "made_with": {name: version(name).partition("+")[0] for name in packages},
        "families": sorted(
            rows.values(), key=lambda row: (not row["recurrent"], row["family"])
        ),
    }
    DATA.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for row in rows(sys.argv[1:] or None):
        print(row, flush=True)
        write([row])
