"""States and caches in the formats of runtimes: what they cost, in which block, and whether it grows along the text.

    python benchmarks/states.py reference:mamba,stressed:reference:hybrid,FOLDER,… [--windows 4] [--device cuda]
                                [--runs DIR] [--write docs/results/states.csv]

All blocks at once in each format, as a runtime would keep them, and each block alone (`kl-lens measure --states`), for
the sum and the worst block. Text: the windows of that command. `--runs` keeps the journals, to go on after a stop.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from common import machine, opened, shown  # isort: skip  (first: it sets the environment that torch reads)

import numpy as np

from kl_lens.measuring.engines import FastEngine
from kl_lens.measuring.perturbation import Perturbation
from kl_lens.model.states import StateFormat
from kl_lens.run.folder import Run
from kl_lens.run.positions import by_position
from kl_lens.run.readings import KL
from kl_lens.run.records import Component
from kl_lens.study.measure import MeasureSettings, states_text
from kl_lens.study.session import Session
from result_files import Row, options, write


def rows(name: str, windows: int, run_folder: Path, device: str) -> list[Row]:
    model = opened(name, device)
    session = Session(given=model)
    settings = MeasureSettings.of(
        model=name, run=run_folder, states=True, windows=windows, workers=1
    )
    session.do(settings)
    alone: dict[tuple[str, str], list[tuple[Component, float]]] = {}
    with Run.open(run_folder) as run:
        for component, measurement, _ in run.state_rows():
            key = component.kind, measurement.format
            alone.setdefault(key, []).append((component, measurement.metrics[KL].value))
    together = [
        Perturbation({}, tuple((component, fmt) for component, _ in parts))
        for (_, fmt), parts in alone.items()
    ]
    ids = session.calibration_windows(
        states_text(settings.calibration, model), model.task
    ).ids
    engine = FastEngine(model)
    readings = [[] for _ in together]
    for slab in engine.slabs(ids):
        engine.prepare(ids[slab.start : slab.stop])
        for samples, more in zip(readings, engine.measure(together), strict=True):
            samples += more
    new = []
    for ((kind, fmt), parts), samples in zip(alone.items(), readings, strict=True):
        tokens = [sample.by_token() for sample in samples]
        curve = by_position(tokens)
        losses = [kl for _, kl in parts]
        worst, most = max(parts, key=lambda part: part[1])
        mean = np.array(tokens, np.float64).mean(1)
        bits = StateFormat.parse(fmt, kind).bits(parts[0][0].shape)
        new.append(
            {
                "model": shown(name),
                "kind": kind,
                "format": fmt,
                "bits": f"{bits:.4g}",
                "windows": str(len(ids)),
                "tokens": str(ids.shape[1]),
                "kl": f"{mean.mean():.3e}",
                "standard error": f"{mean.std(ddof=1) / math.sqrt(len(mean)):.1e}",
                **{
                    f"kl, quarter {i + 1}": f"{bin.value:.3e}"
                    for i, bin in enumerate(curve.means)
                },
                "along the text": curve.trend,
                "sum over blocks": f"{sum(losses):.3e}",
                "worst block": str(worst.block),
                "its share": f"{most / max(sum(losses), 1e-30):.2f}",
            }
        )
        print(*new[-1].values(), sep="; ", flush=True)
    return new


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("models")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    print(machine())
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            run = (arguments.runs or Path(folder)) / name.replace(":", "-").replace(
                "/", "-"
            )
            write(
                arguments.write,
                rows(name, arguments.windows, run, arguments.device),
                ("model", "kind", "format"),
            )


if __name__ == "__main__":
    main()
