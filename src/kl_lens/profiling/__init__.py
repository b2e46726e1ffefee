"""How fast and how large exported files are, in the way they are used, and how fast they could be at most.

Example:
    >>> report = Benchmark(UseSettings(repeats=3)).measure([Path("out/mamba-4mb")])
    >>> report.profiles[0].timings["tokens_per_second"].median
"""

from typing import TYPE_CHECKING

from kl_lens.lazy import lazy_names

if TYPE_CHECKING:
    from kl_lens.profiling.benchmark import Benchmark, InUse, Report, Timing, quick, tag_of
    from kl_lens.profiling.in_use import UseSettings
    from kl_lens.profiling.machine import Machine, measure_machine
    from kl_lens.profiling.subjects import Failure, Timed, read_timed, run_places
    from kl_lens.targets.latency import LatencyProfile
else:
    # `peak`, which weighs a process, must not itself weigh what the benchmark does.
    __getattr__ = lazy_names(
        __name__,
        {
            "kl_lens.profiling.benchmark": [
                "Benchmark", "InUse", "Report", "Timing", "quick", "tag_of",
            ],
            "kl_lens.targets.latency": ["LatencyProfile"],
            "kl_lens.profiling.machine": ["Machine", "measure_machine"],
            "kl_lens.profiling.subjects": ["Failure", "Timed", "read_timed", "run_places"],
            "kl_lens.profiling.in_use": ["UseSettings"],
        },
    )  # fmt: skip

__all__ = [
    "Benchmark",
    "Failure",
    "InUse",
    "LatencyProfile",
    "Machine",
    "Report",
    "Timed",
    "Timing",
    "UseSettings",
    "measure_machine",
    "quick",
    "read_timed",
    "run_places",
    "tag_of",
]
