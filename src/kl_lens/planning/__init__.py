"""Planning: from a sensitivity table to the best use of every byte."""

from kl_lens.planning.budget import (
    BudgetSolution,
    FrontierPoint,
    frontier,
    plan_for_budget,
    plan_for_loss,
)
from kl_lens.planning.files import plan_path, read_plan, write_plan
from kl_lens.planning.predict import (
    Cost,
    Predictor,
    cost_of,
    differences,
    finished_plan,
    interaction,
    prediction_metric,
    repredicted,
    uniform_plan,
    verify,
)
from kl_lens.planning.problem import Problem, build_problem, store_fixed_bytes, stored_fixed_bytes
from kl_lens.planning.rivals import (
    Contender,
    Contest,
    PairedDifference,
    contest,
    paired_difference,
    stock_with_our_methods,
)
from kl_lens.planning.speed import SpeedModel, speed_model

__all__ = [
    "BudgetSolution",
    "Contender",
    "Contest",
    "Cost",
    "FrontierPoint",
    "PairedDifference",
    "Predictor",
    "Problem",
    "SpeedModel",
    "build_problem",
    "contest",
    "cost_of",
    "differences",
    "finished_plan",
    "frontier",
    "interaction",
    "paired_difference",
    "plan_for_budget",
    "plan_for_loss",
    "plan_path",
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
