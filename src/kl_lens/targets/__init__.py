"""Files that real runtimes load, and sessions that run them."""

from kl_lens.targets.artifacts import earlier_artifact, exported_places, read_artifact
from kl_lens.targets.base import StockRecipe, Target
from kl_lens.targets.registry import (
    TARGETS,
    computed_as,
    deployed,
    describe_target,
    dissected,
    export,
    get_target,
    locate,
    menu_of,
    open_session,
    register,
    target_of,
    usual_targets,
)
from kl_lens.targets.session import ALL_LAYERS, LOAD_MODES, Session, SessionSettings

__all__ = [
    "ALL_LAYERS",
    "LOAD_MODES",
    "TARGETS",
    "Session",
    "SessionSettings",
    "StockRecipe",
    "Target",
    "computed_as",
    "deployed",
    "describe_target",
    "dissected",
    "earlier_artifact",
    "export",
    "exported_places",
    "get_target",
    "locate",
    "menu_of",
    "open_session",
    "read_artifact",
    "register",
    "target_of",
    "usual_targets",
]
