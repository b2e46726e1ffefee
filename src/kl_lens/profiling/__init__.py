"""Speed, memory and size of exported files, and how fast they could be at most.

Example:
    >>> report = Benchmark(UseSettings(repeats=3)).measure([Path("out/mamba-4mb")])
    >>> report.profiles[0].timings["tokens_per_second"].median
"""

from typing import TYPE_CHECKING

from kl_lens.base.lazy import lazy_names

if TYPE_CHECKING:
    from kl_lens.base.units import tag_of as tag_of
    from kl_lens.profiling.benchmark import (
        Benchmark as Benchmark,
        InUse as InUse,
        Report as Report,
        Timing as Timing,
        quick as quick,
    )
    from kl_lens.profiling.in_use import UseSettings as UseSettings
    from kl_lens.profiling.machine import Machine as Machine, measure_machine as measure_machine
    from kl_lens.profiling.spread import Ratio as Ratio, ratio_of as ratio_of
    from kl_lens.profiling.subjects import (
        Failure as Failure,
        Timed as Timed,
        read_timed as read_timed,
        run_places as run_places,
    )
else:
    # `peak` measures its own process's memory, so it must not load the benchmark's libraries.
    __getattr__, __all__ = lazy_names(__name__)
