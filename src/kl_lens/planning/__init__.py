"""Planning: from a sensitivity table to the best use of every byte."""

from kl_lens.planning.budget import (
    AchievableRange,
    BudgetSolution,
    achievable_range,
    plan_for_budget,
)
from kl_lens.planning.cost import Cost, FormatShare, cost_of
from kl_lens.planning.drop import DropResult, plan_for_drop
from kl_lens.planning.files import plan_path, read_plan, write_plan
from kl_lens.planning.frontier import Frontier, FrontierPoint, pareto_frontier
from kl_lens.planning.greedy import GreedyResult, greedy_plan
from kl_lens.planning.paper import PIPELINES, best_paper_point, paper_points, published_name
from kl_lens.planning.predict import Predictor, finished_plan, repredicted
from kl_lens.planning.problem import LatencyTable, Problem, build_problem
from kl_lens.planning.ranking import PUBLISHED_METRIC, RANKING_METRICS
from kl_lens.planning.refine import PairedDifference, Refinement, Trial, paired_difference, refine
from kl_lens.planning.table import Comparison, Difference, PlanRow, compare, plan_row
from kl_lens.planning.verify import Verification, verify

__all__ = [
    "PIPELINES",
    "PUBLISHED_METRIC",
    "RANKING_METRICS",
    "AchievableRange",
    "BudgetSolution",
    "Comparison",
    "Cost",
    "Difference",
    "DropResult",
    "FormatShare",
    "Frontier",
    "FrontierPoint",
    "GreedyResult",
    "LatencyTable",
    "PairedDifference",
    "PlanRow",
    "Predictor",
    "Problem",
    "Refinement",
    "Trial",
    "Verification",
    "achievable_range",
    "best_paper_point",
    "build_problem",
    "compare",
    "cost_of",
    "finished_plan",
    "greedy_plan",
    "paired_difference",
    "paper_points",
    "pareto_frontier",
    "plan_for_budget",
    "plan_for_drop",
    "plan_path",
    "plan_row",
    "published_name",
    "read_plan",
    "refine",
    "repredicted",
    "verify",
    "write_plan",
]
