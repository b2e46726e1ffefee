"""KL Lens makes Mamba and hybrid language models smaller, and measures how much quality each file loses.

Example:
    >>> import kl_lens as kl
    >>> study = kl.Study("reference:mamba", target="gguf", folder="runs/mamba")
    >>> study.calibrate(); study.measure()
    >>> plan = study.plan(max_bytes="4.5MB")
    >>> file = study.export(plan)
    >>> study.evaluate(file)[-1].values["kl_mean"]
    >>> study.report()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kl_lens.base.lazy import OPENERS, lazy_names
from kl_lens.base.version import __version__ as __version__

OPENERS[".gguf"] = "kl_lens.targets.gguf.source:opened"

if TYPE_CHECKING:
    from kl_lens import text as text
    from kl_lens.base.errors import KLLensError as KLLensError
    from kl_lens.model import load as load
    from kl_lens.study.study import (
        Study as Study,
        benchmark as benchmark,
        compare as compare,
        evaluate as evaluate,
        generate as generate,
    )
    from kl_lens.targets import open_session as open_session
else:
    __getattr__, __all__ = lazy_names(__name__)
    __dir__ = __all__.copy  # what completion offers
