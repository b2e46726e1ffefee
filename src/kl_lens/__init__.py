"""KL Lens: measure, plan, export and prove mixed-precision quantization of state-space and hybrid models.

Example:
    >>> import kl_lens as kl
    >>> model = kl.load("reference:mamba")
    >>> table = kl.measure(model, text=kl.text.wikitext2("train"), formats=["int4", "int8"], windows=8)
    >>> plan = kl.plan(table, max_bytes="4MB")
    >>> artifact = kl.export(model, plan, target="openvino", folder="out/mamba-4mb")
    >>> print(kl.evaluate(artifact, text=kl.text.wikitext2("test"), limit=20).values["token_perplexity"])
    >>> kl.benchmark(artifact).timings["tokens_per_second"].median
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kl_lens.lazy import lazy_names
from kl_lens.version import __version__ as __version__

if TYPE_CHECKING:
    from kl_lens import text as text
    from kl_lens.checkpoints import load as load
    from kl_lens.errors import KLLensError as KLLensError
    from kl_lens.pipeline import (
        benchmark as benchmark,
        calibrate as calibrate,
        evaluate as evaluate,
        export as export,
        generate as generate,
        measure as measure,
        plan as plan,
        rank as rank,
        report as report,
        verify as verify,
    )
    from kl_lens.targets import open_session as open_session
else:
    __getattr__, __all__ = lazy_names(__name__)
