"""`measure`: how much each component suffers from each format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kl_lens.errors import KLLensError
from kl_lens.paper import write_legacy
from kl_lens.pipeline.events import Events, going_on
from kl_lens.pipeline.settings import (
    COUNT,
    NAMES,
    SIZE,
    OfModel,
    Settings,
    command_of,
    grouped,
    new_run_folder,
    option,
)
from kl_lens.pipeline.workbench import Workbench
from kl_lens.records import Measurement
from kl_lens.runs import CALIBRATION, Run, role_as
from kl_lens.sensitivity.engines import DEFAULT_MEMORY, ENGINES
from kl_lens.sensitivity.perturbation import find_candidates
from kl_lens.sensitivity.sweep import Sweep, SweepResult
from kl_lens.targets import TARGETS, deployed

calibration_text, _what, _how = grouped("calibration text"), grouped("what to measure"), grouped("how")


@dataclass(frozen=True, kw_only=True)
class Calibration(Settings):
    """The text that a model is measured on."""

    text: str = calibration_text(
        "wikitext2:train", "name:split, or a .txt, .jsonl, .jsonl.zst or .parquet file or folder"
    )
    windows: int = calibration_text(64, "how many windows", kind=COUNT)
    window_length: int = calibration_text(512, "tokens each", kind=COUNT)
    seed: int = calibration_text(42, "chooses the windows")


@dataclass(frozen=True, kw_only=True)
class MeasureSettings(Calibration, OfModel):
    verb: ClassVar[str] = "measure"

    run: str | None = option(None, "the run folder (default: runs/<model>)", metavar="DIR")
    formats: tuple[str, ...] = _what(("int4", "int8"), "comma-separated", kind=NAMES)
    components: str | None = _what(None, "only components whose name matches", metavar="REGEX")
    engine: str = _how("fast", "plain is the reference", choices=tuple(ENGINES))
    memory_budget: int = _how(DEFAULT_MEMORY, "for cached states", kind=SIZE)
    as_deployed: str | None = _how(
        None,
        "also quantize the activations as this target's kernels do: the KL of the file that will run",
        choices=TARGETS,
    )
    anytime: bool = _how(False, "stop as soon as the ranking is settled; --windows is the most")
    settled_at: float = _how(0.9, "Kendall τ that counts as settled", metavar="TAU")
    legacy_json: Path | None = _how(
        None, "also write the published layout, one file per bit width", metavar="FILE"
    )


@dataclass(frozen=True)
class MeasureResult:
    folder: Path
    measurements: list[Measurement]
    noise: float  # KL that the measuring alone makes of no difference
    sweep: SweepResult


def measure(settings: MeasureSettings, bench: Workbench, events: Events) -> MeasureResult:
    model = bench.model(settings)
    if not settings.formats:
        raise KLLensError("--formats names no format; `int4,int8` is the default")
    candidates, unfit = find_candidates(model.anatomy, settings.formats, settings.components)
    windows = bench.drawn(
        settings.text,
        model,
        windows=settings.windows,
        length=settings.window_length,
        seed=settings.seed,
        split=None,
    )
    folder = new_run_folder(settings.run, model.name)
    target = settings.as_deployed
    context = deployed(target) if target else None
    with Run.create(folder) as run:
        run.note_command(["kl-lens", *command_of(settings)])
        with going_on(folder), events.progress("measuring") as progress:
            sweep = Sweep(
                model, run, settings.engine, settings.memory_budget, progress, context, target or "weights"
            )
            if settings.anytime:
                result = sweep.measure_until_settled(candidates, windows, threshold=settings.settled_at)
            else:
                result = sweep.measure(candidates, windows)
        alike: dict[tuple[str, str], list[str]] = {}
        for component, name, reason in unfit:
            alike.setdefault((name, reason), []).append(component.name)
        for (name, reason), names in alike.items():
            more = f" and {len(names) - 1} more were" if len(names) > 1 else " was"
            events.warn(f"{names[0]}{more} not measured in {name}: {reason}")
        role = role_as(CALIBRATION, target)
        measurements = run.measurements(role)
        noise = (run.load("noise", role) or {}).get("kl_teacher_to_student", 0.0)
    if settings.legacy_json:
        for path in write_legacy(settings.legacy_json, measurements):
            events.note(f"wrote {path}")
    return MeasureResult(folder, measurements, noise, result)
