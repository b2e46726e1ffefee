"""Opening a model, finding what it is made of, and running any part of it."""

from kl_lens.checkpoints.anatomy import Anatomy, anatomy_of
from kl_lens.checkpoints.chain import BlockCalls, Chain
from kl_lens.checkpoints.opening import LoadedModel, load, load_tokenizer, resolve
from kl_lens.checkpoints.stress import Planted, stress

__all__ = [
    "Anatomy",
    "BlockCalls",
    "Chain",
    "LoadedModel",
    "Planted",
    "anatomy_of",
    "load",
    "load_tokenizer",
    "resolve",
    "stress",
]
