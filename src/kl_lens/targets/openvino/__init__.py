"""The OpenVINO target: exports plans as stateful IRs and runs them.

artifact = export(model, plan, folder, device_profile="cpu")
session = open_session(folder)
logits = session.prefill(ids)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_lens.base.lazy import lazy_names
from kl_lens.run.records import Artifact, Plan

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel
    from kl_lens.targets.openvino.profiles import PROFILES as PROFILES, DeviceProfile as DeviceProfile
    from kl_lens.targets.openvino.session import (
        OpenVINOSession as OpenVINOSession,
        open_session as open_session,
    )
else:
    __getattr__, __all__ = lazy_names(__name__)
    __all__.append("export")


def export(model: LoadedModel, plan: Plan, folder: Path | str, **options: Any) -> Artifact:
    """Writes the files and their record. Options: see `kl_lens.targets.openvino.convert.export`."""
    from kl_lens.targets.registry import get_target

    return get_target("openvino").export(model, plan, Path(folder), **options)
