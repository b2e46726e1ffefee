"""Files that real runtimes load, and sessions that run them."""

from kl_lens.targets.abilities import StockRecipe as StockRecipe, Target as Target
from kl_lens.targets.exporting import (
    earlier_artifact as earlier_artifact,
    exported_places as exported_places,
    read_artifact as read_artifact,
)
from kl_lens.targets.registry import (
    TARGETS as TARGETS,
    computed_as as computed_as,
    deployed as deployed,
    describe_target as describe_target,
    dissected as dissected,
    export as export,
    get_target as get_target,
    locate as locate,
    menu_of as menu_of,
    open_session as open_session,
    register as register,
    target_of as target_of,
    usual_targets as usual_targets,
)
from kl_lens.targets.session import (
    ALL_LAYERS as ALL_LAYERS,
    LOAD_MODES as LOAD_MODES,
    Session as Session,
    SessionSettings as SessionSettings,
)
