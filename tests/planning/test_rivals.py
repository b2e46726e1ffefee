"""Stock recipes with our methods."""

from types import SimpleNamespace
from typing import Any

from kl_lens.planning import build_problem, stock_with_our_methods
from kl_lens.weights.recipes import parsed
from tests.planning.tables import component, table_of


def test_stock_assignments_get_our_methods_where_they_are_no_larger() -> None:
    parts = [
        component("head", (64, 64)),
        component("in_proj", (64, 64), fused_with=["k"]),
        component("k"),
    ]
    damage = {"int4": 0.2, "int8": 0.02, "int8+search": 0.01, "q8_0": 0.001}
    table = table_of(
        parts, {(c.name, recipe): kl for c in parts for recipe, kl in damage.items()}
    )
    target: Any = SimpleNamespace(
        holds=lambda grid, shape: "not here" if grid.name == "q8_0" else None,
        keeps=lambda component: None,
        overhead=lambda grid: 10,
    )
    mixture = parsed({"head": "int8", "in_proj": "int4", "k": "int8"})
    problem = build_problem(table, target=target, keep_fused=False)
    [outcome] = stock_with_our_methods(problem, [mixture])
    assert outcome == {"head": "int8+search", "in_proj": "int4", "k": "int8+search"}
    only = build_problem(table, target=target, keep_fused=False, recipes=["int8"])
    assert stock_with_our_methods(only, [mixture]) == []
