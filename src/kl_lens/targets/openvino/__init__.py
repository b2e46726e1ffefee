"""OpenVINO: stateful IRs with the precisions that were planned, and sessions that run them.

artifact = export(model, plan, folder, device_profile="cpu")
session = open_session(folder)
logits = session.prefill(ids)
"""

from typing import TYPE_CHECKING

from kl_lens.lazy import lazy_names
from kl_lens.targets.openvino.session import OpenVINOSession, open_session

if TYPE_CHECKING:
    from kl_lens.targets.openvino.convert import export
    from kl_lens.targets.openvino.profiles import PROFILES, DeviceProfile
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "kl_lens.targets.openvino.convert": ["export"],
            "kl_lens.targets.openvino.profiles": ["PROFILES", "DeviceProfile"],
        },
    )

__all__ = [
    "PROFILES",
    "DeviceProfile",
    "OpenVINOSession",
    "export",
    "open_session",
    "supported_families",
]


def supported_families() -> tuple[str, ...]:
    """The `model_type`s whose IRs are tested to give PyTorch's logits."""
    from kl_lens.targets.openvino.capture import FAMILIES

    return FAMILIES
