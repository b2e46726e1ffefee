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

import importlib
from typing import TYPE_CHECKING, Any

from kl_lens.version import __version__

if TYPE_CHECKING:
    from kl_lens import text
    from kl_lens.checkpoints import load
    from kl_lens.errors import KLLensError
    from kl_lens.pipeline import benchmark, evaluate, export, measure, plan
    from kl_lens.targets import open_session

__all__ = [
    "KLLensError",
    "__version__",
    "benchmark",
    "evaluate",
    "export",
    "load",
    "measure",
    "open_session",
    "plan",
    "text",
]

# Loaded when first asked for: a small process of ours must not pay for torch and transformers.
_HOMES = {
    "KLLensError": "kl_lens.errors",
    "benchmark": "kl_lens.pipeline",
    "evaluate": "kl_lens.pipeline",
    "export": "kl_lens.pipeline",
    "load": "kl_lens.checkpoints",
    "measure": "kl_lens.pipeline",
    "open_session": "kl_lens.targets",
    "plan": "kl_lens.pipeline",
}


def __getattr__(name: str) -> Any:
    if name == "text":
        return importlib.import_module("kl_lens.text")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kl_lens' has no attribute {name!r}")
