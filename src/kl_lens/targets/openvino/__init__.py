"""OpenVINO: stateful IRs with the precisions that were planned, and sessions that run them.

artifact = export(model, plan, folder, device_profile="cpu")
session = open_session(folder)
logits = session.prefill(ids)
"""

from kl_lens.targets.openvino.capture import FAMILIES
from kl_lens.targets.openvino.convert import export
from kl_lens.targets.openvino.profiles import PROFILES, DeviceProfile
from kl_lens.targets.openvino.session import OpenVINOSession, open_session

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
    return FAMILIES
