"""Speed, memory and size of exported files, and how fast they could be at most.

Example:
    >>> report = Benchmark(UseSettings(repeats=3), [InUse()]).measure([Path("out/mamba-4mb")])
    >>> report.profiles[0].timings["tokens_per_second"].median
"""

from typing import TYPE_CHECKING

from kl_lens.base.lazy import lazy_names

if TYPE_CHECKING:
    from kl_lens.base.units import tag_of as tag_of
    from kl_lens.profiling.benchmark import (
        Benchmark as Benchmark,
        Report as Report,
        Timing as Timing,
        UseSettings as UseSettings,
        run_places as run_places,
    )
    from kl_lens.profiling.in_use import InUse as InUse
    from kl_lens.profiling.machine import Ratio as Ratio, ratio_of as ratio_of
else:
    # `memory` measures its own process, so it must not load the benchmark's libraries.
    __getattr__, __all__ = lazy_names(__name__)
