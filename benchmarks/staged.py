"""The staged search against measuring everything: how much time it saves, and what its plan loses.

    python benchmarks/staged.py [--models reference:mamba,FOLDER,…] [--max-loss 0.01] [--max-bytes 4.5MB]
                                [--write docs/results/staged.csv]

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

from common import machine
from kl_lens.base.units import parse_bytes
from kl_lens.run.records import Estimate
from kl_lens.study.calibrate import CalibrateSettings
from kl_lens.study.measure import MeasureResult, MeasureSettings
from kl_lens.study.plan import PlanSettings
from kl_lens.study.session import Session
from result_files import Row, add_option, write
from rivals import REFERENCES, STRESSED_PREFIX, models, shown
from stress import plant

SEARCHED = 8  # held-out windows that the search uses, as in `kl-lens run`


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(session: Session, **how: Any) -> tuple[MeasureResult, float]:
    begin = processor_seconds()
    result = session.do(MeasureSettings.of(**how))
    assert isinstance(result, MeasureResult)
    return result, processor_seconds() - begin


def planned(
    session: Session, folder: Path, arguments: argparse.Namespace, **limit: Any
) -> tuple[int, Estimate]:
    """The plan's size and its KL on text that the search has not seen."""
    how = {"run": str(folder), "target": arguments.target}
    session.do(PlanSettings.of(name="plan", held_out_windows=SEARCHED, **how, **limit))
    check = PlanSettings.of(plan="plan", verify=True, held_out_windows=arguments.held_out_windows, **how)
    plan = session.do(check).plans[-1]
    assert plan.measured is not None
    return plan.file_bytes or 0, plan.measured.kl


def compare(name: str, arguments: argparse.Namespace, place: Path) -> Row:
    session, limit = Session(), {"max_loss": arguments.max_loss}
    if arguments.max_bytes:
        limit = {"max_bytes": parse_bytes(arguments.max_bytes)}
    staged_run, whole_run = place / "staged", place / "whole"
    given = name.removeprefix(STRESSED_PREFIX)
    model = session.model(given)
    if name != given:
        plant(model, given)
        session = Session(given=model)
    session.do(CalibrateSettings.of(model=given, run=str(staged_run)))
    shutil.copytree(staged_run, whole_run)
    how = {"model": given, "target": arguments.target, "windows": arguments.windows}
    # The staged search first: what is compiled on the way counts against it.
    held_out = {"held_out_windows": SEARCHED}
    staged, staged_seconds = measured(session, run=str(staged_run), **limit, **held_out, **how)
    whole, whole_seconds = measured(session, run=str(whole_run), exhaustive=True, **how)
    our_bytes, our_kl = planned(session, staged_run, arguments, **limit)
    best_bytes, best_kl = planned(session, whole_run, arguments, max_bytes=our_bytes)
    return {
        "model": shown(name),
        "target": arguments.target,
        "limit": f"--max-bytes {arguments.max_bytes}"
        if arguments.max_bytes
        else f"--max-loss {arguments.max_loss}",
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(REFERENCES), help="names, or folders of models")
    parser.add_argument("--target", default="gguf")
    parser.add_argument("--windows", type=int, default=8, help="of 512 calibration tokens")
    parser.add_argument("--held-out-windows", type=int, default=32, help="the second half judges plans")
    parser.add_argument("--max-loss", type=float, default=0.01)
    parser.add_argument("--max-bytes", help="instead of --max-loss")
    add_option(parser)
    arguments = parser.parse_args()
    print(machine())
    for name in models(arguments.models):
        with tempfile.TemporaryDirectory() as folder:
            row = compare(name, arguments, Path(folder))
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        write(arguments.write, [row], ("model", "target", "limit"))


if __name__ == "__main__":
    main()
