"""Planning: from a sensitivity table to the best use of every byte."""

from kl_lens.planning.budget import (
    BudgetSolution as BudgetSolution,
    FrontierPoint as FrontierPoint,
    frontier as frontier,
    plan_for_budget as plan_for_budget,
    plan_for_loss as plan_for_loss,
)
from kl_lens.planning.files import (
    plan_path as plan_path,
    read_plan as read_plan,
    require_distinct as require_distinct,
    stored_plans as stored_plans,
    write_plan as write_plan,
)
from kl_lens.planning.predict import (
    Cost as Cost,
    Predictor as Predictor,
    cost_of as cost_of,
    finished_plan as finished_plan,
    interaction as interaction,
    repredicted as repredicted,
    uniform_plan as uniform_plan,
    verify as verify,
)
from kl_lens.planning.problem import (
    Held as Held,
    Problem as Problem,
    build_problem as build_problem,
    stock_with_our_methods as stock_with_our_methods,
    store_fixed_bytes as store_fixed_bytes,
    stored_fixed_bytes as stored_fixed_bytes,
)
from kl_lens.planning.speed import SpeedModel as SpeedModel, speed_model as speed_model
