"""Reproduces the paper (arXiv 2604.13440): its points, its greedy rule, its files.

Its timing protocol, `benchmark_app`, is `PublishedTiming`.
"""

from typing import TYPE_CHECKING

from kl_lens.base.lazy import lazy_names

if TYPE_CHECKING:
    from kl_lens.paper.layouts import (
        read_legacy as read_legacy,
        write_legacy as write_legacy,
        write_published as write_published,
    )
    from kl_lens.paper.points import (
        PIPELINES as PIPELINES,
        PUBLISHED_METRIC as PUBLISHED_METRIC,
        GreedyResult as GreedyResult,
        best_paper_point as best_paper_point,
        greedy_plan as greedy_plan,
        paper_points as paper_points,
    )
    from kl_lens.paper.timing import PublishedTiming as PublishedTiming
else:
    # Planning needs only numpy; the rest needs torch.
    __getattr__, __all__ = lazy_names(__name__)
