"""Files in the paper's layouts. Sensitivity: {layer: {"sqnr_db", "kl_teacher_to_student", …}}, one per bit width;
perplexity: {model: {point: perplexity}}.

Sensitivities are read as they are. In the published files `kl_teacher_to_student` is about 5e8 in every row (their code
passes probabilities instead of log-probabilities), and both KLs are sums over a sequence, not means per token;
`kl_student_to_teacher`, `sqnr_db` and `delta_cross_entropy` can still be used for ranking.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kl_lens.base.errors import RunError
from kl_lens.base.files import require_own_file, write_text
from kl_lens.base.units import tag_of
from kl_lens.judging.evaluator import read_scores
from kl_lens.judging.texts import EvaluationText, protocol_digest
from kl_lens.model import Anatomy
from kl_lens.run.folder import Run
from kl_lens.run.records import Estimate, Measurement

KEYS = (
    "sqnr_db",
    "kl_teacher_to_student",
    "kl_student_to_teacher",
    "delta_cross_entropy",
)
LARGEST = 10**300
SUFFIXES = {"int4": "4bit", "int8": "8bit"}  # of file names, by format


def write_legacy(path: Path, measurements: Sequence[Measurement]) -> list[Path]:
    """Writes one file per format: PATH for a single one, else NAME_4bit.json and so on."""
    names = list(dict.fromkeys(m.format for m in measurements))
    written = []
    for name in names:
        content = {
            m.component: {key: m.metrics[key].value for key in KEYS}
            for m in measurements
            if m.format == name
        }
        target = path
        if len(names) > 1:
            target = path.with_stem(f"{path.stem}_{SUFFIXES.get(name, name)}")
        require_own_file(target, "--legacy-json", KEYS[0])
        write_text(target, json.dumps(content, indent=2))
        written.append(target)
    return written


def read_legacy(path: Path, format_name: str, anatomy: Anatomy) -> list[Measurement]:
    """Published measurements in one format, for the components of a model.

    Raises:
        RunError: the file has another layout, or names a layer that the model does not have.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"{path}: no such file; check --int4 and --int8") from error
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} is not JSON ({error})") from error
    layers = data.values() if isinstance(data, dict) else ()
    if not layers or not all(isinstance(metrics, dict) for metrics in layers):
        raise RunError(
            f"{path} is not a published sensitivity file: expected {{layer: {{metric: value}}}}"
        )
    by_name = {name: c for c in anatomy.candidates for name in (c.name, *c.tied_with)}
    unknown = [layer for layer in data if layer not in by_name]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise RunError(
            f"{path} names {unknown[0]}{more}, which the model does not have (or which is not quantizable); is --model "
            "the right one?"
        )
    measurements = []
    for layer, entry in data.items():
        for key, value in entry.items():
            # JSON integers are unlimited, floats are not; and bool is an int.
            is_whole = type(value) is int and abs(value) < LARGEST
            if type(value) is not float and not is_whole:
                raise RunError(f"{path}: {layer}: {key} is {value!r}, expected a number")
        if not set(entry) & set(KEYS):
            raise RunError(f"{path}: {layer} has none of {', '.join(KEYS)}")
        metrics = {key: Estimate(float(value)) for key, value in entry.items()}
        name = by_name[layer].name
        measurements.append(
            Measurement(name, format_name, metrics, 0, 0, "published", 0.0)
        )
    return measurements


def write_published(
    run: Run, model: str, text: EvaluationText, tag: str | None = None
) -> Path:
    """`perplexity_results_{tag}.json`: token perplexities of everything in the run that was scored on this text.

    A plan computed in PyTorch is named after the plan; files are `TARGET/PLAN`.
    """
    points = {
        score.subject.label.removeprefix("torch/"): score.values["token_perplexity"].value
        for score in read_scores(run, "perplexity")
        if protocol_digest(score.protocol) == text.digest
    }
    path = run.folder / f"perplexity_results_{tag_of(tag or Path(text.label).name)}.json"
    write_text(path, json.dumps({model: points}, indent=1) + "\n")
    return path
