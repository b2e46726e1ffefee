"""Are ratios of speed right on a busy machine? Three files of reference:mamba per runtime, alone and beside a load.

    python benchmarks/speeds.py                  # OpenVINO and llama.cpp, one thread, two busy processes
    python benchmarks/speeds.py --threads 2      # where the load leaves no processor free: expect "not measurable"

Start it on a quiet machine. It prints the ratio of each quantized file to the FP16 file, first alone and then beside
the busy processes, and whether the second interval contains the first ratio. Exit code 1: one that was shown did not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import common  # noqa: F401  (before torch: it sets what torch reads when it is loaded)
import kl_lens as kl
from kl_lens import targets
from kl_lens.profiling import Benchmark, Ratio, UseSettings, ratio_of
from kl_lens.records import Plan

FORMATS = {"openvino": ("fp16", "int8", "int4"), "gguf": ("fp16", "q8_0", "q4_0")}
TIMING = "tokens_per_second"
# Ends with its parent, however that ends.
SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


@contextmanager
def busy(processes: int) -> Iterator[None]:
    started = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def export(target: str, folder: Path) -> list[Path]:
    model = kl.load("reference:mamba")
    for name in FORMATS[target]:
        stored = {} if name == "fp16" else {c.name: name for c in model.anatomy.candidates}
        targets.export(model, Plan(name, stored, made_by="benchmark"), target, folder / name)
    return [folder / name for name in FORMATS[target]]


def measured(places: list[Path], settings: UseSettings) -> tuple[dict[str, Ratio], str]:
    report = Benchmark(settings).measure(places)
    if report.failures:
        raise SystemExit(report.failures[0].reason)
    found = {p.subject.plan or "": ratio_of(p, TIMING) for p in report.profiles}
    load = report.profiles[-1].load
    return found, ", ".join(f"{name} {share:.0%}" for name, share in load.items())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--busy", type=int, default=2, help="processes of the load")
    parser.add_argument("--repeats", type=int, default=3, help="as `kl-lens run` does")
    options = parser.parse_args()
    settings = UseSettings((32, 128), new_tokens=32, repeats=options.repeats, threads=options.threads)
    wrong = 0
    for target in options.targets:
        with tempfile.TemporaryDirectory() as folder:
            places = export(target, Path(folder))
            quiet, load = measured(places, settings)
            print(f"{target}, alone: {load}")
            with busy(options.busy):
                loaded, load = measured(places, settings)
            print(f"{target}, beside {options.busy} busy processes: {load}")
        for name in FORMATS[target][1:]:
            alone, beside = quiet[name], loaded[name]
            verdict = "nothing to compare"
            if not alone.obstacle and not beside.obstacle and alone.spread and beside.spread:
                contains = beside.spread.low <= alone.spread.median <= beside.spread.high
                wrong += not contains
                verdict = "contains it" if contains else "DOES NOT contain it"
            print(f"  {name:5} alone {alone.words}; beside the load {beside.words}: {verdict}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
