"""Files that real runtimes load, and sessions that run them."""

from kl_lens.targets.session import Session

__all__ = ["Session"]
