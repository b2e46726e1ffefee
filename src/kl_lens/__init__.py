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
from kl_lens.version import __version__

if TYPE_CHECKING:
    from kl_lens import text
    from kl_lens.checkpoints import load
    from kl_lens.errors import KLLensError
    from kl_lens.pipeline import (
        benchmark,
        calibrate,
        evaluate,
        export,
        generate,
        measure,
        plan,
        rank,
        report,
        verify,
    )
    from kl_lens.targets import open_session
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "kl_lens.checkpoints": ["load"],
            "kl_lens.errors": ["KLLensError"],
            "kl_lens.pipeline": [
                "benchmark", "calibrate", "evaluate", "export", "generate", "measure", "plan", "rank", "report",
                "verify",
            ],
            "kl_lens.targets": ["open_session"],
        },
        submodules=["text"],
    )  # fmt: skip

__all__ = [
    "KLLensError",
    "__version__",
    "benchmark",
    "calibrate",
    "evaluate",
    "export",
    "generate",
    "load",
    "measure",
    "open_session",
    "plan",
    "rank",
    "report",
    "text",
    "verify",
]
