"""KL Lens: measure, plan, export and prove mixed-precision quantization of state-space and hybrid models.

Example:
    >>> import kl_lens as kl
    >>> model = kl.load("reference:mamba")
    >>> print(len(model.anatomy.candidates), "components can be quantized")
"""

from kl_lens import text
from kl_lens.checkpoints import load
from kl_lens.errors import KLLensError
from kl_lens.version import __version__

__all__ = ["KLLensError", "__version__", "load", "text"]
