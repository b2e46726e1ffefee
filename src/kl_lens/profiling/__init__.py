"""How fast and how large exported files are, in the way they are used, and how fast they could be at most.

Example:
    >>> report = Benchmark(UseSettings(repeats=3)).measure({"mine": Path("out/mamba-4mb")})
    >>> report.profiles[0].timings["tokens_per_second"].median
"""

from typing import TYPE_CHECKING

from kl_lens.lazy import lazy_names

if TYPE_CHECKING:
    from kl_lens.profiling.benchmark import PROTOCOLS, Benchmark, Report, quick, require_device, tag_of
    from kl_lens.profiling.latency import LatencyProfile
    from kl_lens.profiling.machine import Machine, measure_machine
    from kl_lens.profiling.subjects import Failure, Subject, named_places, read_subject, run_places
    from kl_lens.profiling.use import UseSettings
else:
    # `peak`, which weighs a process, must not itself weigh what the benchmark does.
    __getattr__ = lazy_names(
        __name__,
        {
            "kl_lens.profiling.benchmark": [
                "PROTOCOLS", "Benchmark", "Report", "quick", "require_device", "tag_of",
            ],
            "kl_lens.profiling.latency": ["LatencyProfile"],
            "kl_lens.profiling.machine": ["Machine", "measure_machine"],
            "kl_lens.profiling.subjects": [
                "Failure", "Subject", "named_places", "read_subject", "run_places",
            ],
            "kl_lens.profiling.use": ["UseSettings"],
        },
    )  # fmt: skip

__all__ = [
    "PROTOCOLS",
    "Benchmark",
    "Failure",
    "LatencyProfile",
    "Machine",
    "Report",
    "Subject",
    "UseSettings",
    "measure_machine",
    "named_places",
    "quick",
    "read_subject",
    "require_device",
    "run_places",
    "tag_of",
]
