"""Files that real runtimes load, and sessions that run them."""

from kl_lens.targets.registry import TARGETS, deployed, export, open_session, read_artifact
from kl_lens.targets.session import Session

__all__ = ["TARGETS", "Session", "deployed", "export", "open_session", "read_artifact"]
