"""What reproduces the paper (arXiv 2604.13440): its points, its greedy rule, its files. The product stands elsewhere.

Its timing protocol, `benchmark_app`, is `PublishedTiming`.
"""

from typing import TYPE_CHECKING

from kl_lens.lazy import lazy_names

if TYPE_CHECKING:
    from kl_lens.paper.greedy import GreedyResult, greedy_plan
    from kl_lens.paper.legacy import read_legacy, write_legacy
    from kl_lens.paper.lists import PUBLISHED_METRIC, RANKING_METRICS
    from kl_lens.paper.points import PIPELINES, best_paper_point, paper_points
    from kl_lens.paper.results import write_published
    from kl_lens.paper.timing import PublishedTiming
else:
    # Planning needs numpy alone; published files need a model's anatomy, and results what evaluated it.
    __getattr__ = lazy_names(
        __name__,
        {
            "kl_lens.paper.greedy": ["GreedyResult", "greedy_plan"],
            "kl_lens.paper.legacy": ["read_legacy", "write_legacy"],
            "kl_lens.paper.lists": ["PUBLISHED_METRIC", "RANKING_METRICS"],
            "kl_lens.paper.points": ["PIPELINES", "best_paper_point", "paper_points"],
            "kl_lens.paper.results": ["write_published"],
            "kl_lens.paper.timing": ["PublishedTiming"],
        },
    )

__all__ = [
    "PIPELINES",
    "PUBLISHED_METRIC",
    "RANKING_METRICS",
    "GreedyResult",
    "PublishedTiming",
    "best_paper_point",
    "greedy_plan",
    "paper_points",
    "read_legacy",
    "write_legacy",
    "write_published",
]
