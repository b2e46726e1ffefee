"""Planning: from a sensitivity table to the best use of every byte."""

from kl_lens.planning.budget import (
    AchievableRange,
    BudgetSolution,
    achievable_range,
    plan_for_budget,
)
from kl_lens.planning.cost import Cost, RecipeShare, cost_of
from kl_lens.planning.drop import LossResult, plan_for_loss
from kl_lens.planning.files import plan_path, read_plan, write_plan
from kl_lens.planning.frontier import Frontier, FrontierPoint, pareto_frontier
from kl_lens.planning.inputs import stock_with_our_methods, store_fixed_bytes, stored_fixed_bytes
from kl_lens.planning.predict import Predictor, finished_plan, prediction_metric, repredicted, uniform_plan
from kl_lens.planning.problem import Problem, build_problem
from kl_lens.planning.rivals import Contender, Contest, PairedDifference, contest, paired_difference
from kl_lens.planning.speed import SpeedModel, speed_model
from kl_lens.planning.table import Comparison, Difference, PlanRow, compare, plan_row
from kl_lens.planning.verify import Verification, interaction, verify

__all__ = [
    "AchievableRange",
    "BudgetSolution",
    "Comparison",
    "Contender",
    "Contest",
    "Cost",
    "Difference",
    "Frontier",
    "FrontierPoint",
    "LossResult",
    "PairedDifference",
    "PlanRow",
    "Predictor",
    "Problem",
    "RecipeShare",
    "SpeedModel",
    "Verification",
    "achievable_range",
    "build_problem",
    "compare",
    "contest",
    "cost_of",
    "finished_plan",
    "interaction",
    "paired_difference",
    "pareto_frontier",
    "plan_for_budget",
    "plan_for_loss",
    "plan_path",
    "plan_row",
    "prediction_metric",
    "read_plan",
    "repredicted",
    "speed_model",
    "stock_with_our_methods",
    "store_fixed_bytes",
    "stored_fixed_bytes",
    "uniform_plan",
    "verify",
    "write_plan",
]
