"""OpenVINO's own `benchmark_app`: its command line and its output.

The plugin settings are its defaults, as published: this is not the fastest way to run a quantized model
(docs/targets.md), it is the comparable one.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from kl_lens.base.errors import TargetError
from kl_lens.base.files import write_text
from kl_lens.targets.openvino.folder import graph_file

_LINE = r"\[ INFO \]\s+{name}:\s+([0-9.]+) (us|ms|s|iterations|FPS)\s*$"
_TO_MILLISECONDS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


@dataclass(frozen=True)
class AppReport:
    """The figures that it printed."""

    iterations: int
    duration_seconds: float
    median_ms: float
    average_ms: float
    min_ms: float
    max_ms: float
    throughput_fps: float
    threads: int | None = None  # that OpenVINO chose, if it says so


class BenchmarkApp:
    """How to call it and read its output; `paper/timing.py` decides when and how often."""

    def input_shapes(self, place: Path) -> str | None:
        """One token. benchmark_app fills inputs at random, so `beam_idx` finds no state and every token starts from
        zeros: the same work."""
        from kl_lens.targets.openvino.session import read_graph

        shapes = []
        for entry in read_graph(graph_file(place)).inputs:
            shape = entry.get_partial_shape()
            if shape.is_dynamic:
                sizes = ",".join(str(d.get_length()) if d.is_static else "1" for d in shape)
                shapes.append(f"{entry.get_any_name()}[{sizes}]")
        return ",".join(shapes) or None

    def command(
        self, place: Path, *, seconds: int, iterations: int, device: str, threads: int | None, beside: Path
    ) -> list[str]:
        """Calls the program of this environment, so that the OpenVINO version is the same.

        The number of threads goes into a file: benchmark_app does not accept `-nthreads` together with `-hint`.
        """
        words = [sys.executable, "-m", "openvino.tools.benchmark.main"]
        if (program := Path(sys.executable).parent / "benchmark_app").is_file():
            words = [str(program)]
        words += ["-m", str(graph_file(place)), "-d", device, "-hint", "latency"]
        words += ["-t", str(seconds), "-niter", str(iterations), "--inference_only", "TRUE"]
        if shapes := self.input_shapes(place):
            words += ["-data_shape", shapes]
        if threads is not None:
            write_text(beside, json.dumps({"CPU": {"INFERENCE_NUM_THREADS": threads}}))
            words += ["-load_config", str(beside)]
        return words

    def read(self, text: str) -> AppReport:
        """Latencies are printed in milliseconds, or in microseconds when the model is fast.

        Raises TargetError with the program's own message if there is no report.
        """

        def found(name: str) -> float:
            match = re.search(_LINE.format(name=name), text, re.MULTILINE)
            if match is None:
                raise TargetError(f"benchmark_app printed no {name!r}: {self.complaint(text)}")
            return float(match[1]) * _TO_MILLISECONDS.get(match[2], 1.0)

        threads = re.search(r"INFERENCE_NUM_THREADS: (\d+)", text)
        return AppReport(
            int(found("Count")), found("Duration") / 1e3, found("Median"), found("Average"), found("Min"), found("Max"),
            found("Throughput"), int(threads[1]) if threads else None,
        )  # fmt: skip

    def complaint(self, text: str) -> str:
        """The program's last line, which on failure is the innermost reason."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return (lines or ["it printed nothing"])[-1]
