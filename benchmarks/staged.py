"""The staged search against measuring everything: how much time it saves, and what its plan loses.

    python benchmarks/staged.py [--models reference:mamba,FOLDER,…] [--write docs/results/staged.csv]

Both searches share the statistics. Their time is processor time of `measure` (user and system). The staged plan is made
as `kl-lens run` makes it. The exhaustive search then makes its best plan of no more bytes, and both are measured on
other held-out windows. With OMP_NUM_THREADS=1 and NUMBA_NUM_THREADS=1 other work on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
from pathlib import Path
from typing import Any

from common import ALL, machine, models, opened, shown
from kl_lens.run.records import Estimate
from kl_lens.study.calibrate import CalibrateSettings
from kl_lens.study.measure import MeasureResult, MeasureSettings
from kl_lens.study.plan import PlanSettings
from kl_lens.study.session import Session
from result_files import Row, options, write

MAX_LOSS = 0.01  # nats per token, as in `kl-lens run`
SEARCHED = 8  # held-out windows that the search uses, as in `kl-lens run`
JUDGING = 32  # the second half judges plans


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(session: Session, **settings: Any) -> tuple[MeasureResult, float]:
    begin = processor_seconds()
    result = session.do(MeasureSettings.of(**settings))
    assert isinstance(result, MeasureResult)
    return result, processor_seconds() - begin


def planned(
    session: Session, folder: Path, target: str, **limit: Any
) -> tuple[int, Estimate]:
    """The plan's size and its KL on text that the search has not seen."""
    settings = {"run": str(folder), "target": (target,)}
    session.do(
        PlanSettings.of(name="plan", held_out_windows=SEARCHED, **settings, **limit)
    )
    check = PlanSettings.of(
        plan="plan", verify=True, held_out_windows=JUDGING, **settings
    )
    plan = session.do(check).plans[-1]
    assert plan.measured is not None
    return plan.file_bytes or 0, plan.measured.kl


def compare(name: str, arguments: argparse.Namespace, folder: Path) -> Row:
    session = Session(given=opened(name))
    staged_run = folder / "staged"
    whole_run = folder / "whole"
    session.do(CalibrateSettings.of(model=name, run=str(staged_run)))
    shutil.copytree(staged_run, whole_run)
    target = (arguments.target,)
    settings = {"model": name, "target": target, "windows": arguments.windows}
    # The staged search first: what is compiled on the way counts against it.
    limit = {"max_loss": MAX_LOSS, "held_out_windows": SEARCHED}
    staged, staged_seconds = measured(session, run=str(staged_run), **limit, **settings)
    whole, whole_seconds = measured(
        session, run=str(whole_run), exhaustive=True, **settings
    )
    our_bytes, our_kl = planned(session, staged_run, arguments.target, max_loss=MAX_LOSS)
    best_bytes, best_kl = planned(
        session, whole_run, arguments.target, max_bytes=our_bytes
    )
    return {
        "model": shown(name),
        "target": arguments.target,
        "limit": f"--max-loss {MAX_LOSS}",
        "windows": str(arguments.windows),
        "candidates": str(whole.sweep.candidates),
        "measured": str(staged.sweep.candidates),
        "seconds_exhaustive": f"{whole_seconds:.1f}",
        "seconds_staged": f"{staged_seconds:.1f}",
        "time_ratio": f"{staged_seconds / whole_seconds:.2f}",
        "staged_mb": f"{our_bytes / 1e6:.3f}",
        "exhaustive_mb": f"{best_bytes / 1e6:.3f}",
        "staged_kl": f"{our_kl.value:.5f}",
        "exhaustive_kl": f"{best_kl.value:.5f}",
        "kl_se": f"{best_kl.standard_error:.0e}",
        "kl_ratio": f"{our_kl.value / best_kl.value:.3f}",
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", default=ALL, help="names, or folders of models")
    parser.add_argument("--target", default="gguf")
    parser.add_argument(
        "--windows", type=int, default=8, help="of 512 calibration tokens"
    )
    arguments = parser.parse_args()
    print(machine())
    for name in models(arguments.models):
        with tempfile.TemporaryDirectory() as folder:
            row = compare(name, arguments, Path(folder))
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        write(arguments.write, [row], ("model", "target", "limit"))


if __name__ == "__main__":
    main()
