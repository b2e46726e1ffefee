"""Opens a model, finds its components, and runs any part of it."""

from kl_lens.model.anatomy import Anatomy, anatomy_of
from kl_lens.model.chain import BlockCalls, Chain, States
from kl_lens.model.images import ImageTask, own_images
from kl_lens.model.opening import LoadedModel, load, model_folder, pinned
from kl_lens.model.tasks import LanguageTask, Task
from kl_lens.model.tokenizer import load_tokenizer

__all__ = [
    "Anatomy",
    "BlockCalls",
    "Chain",
    "ImageTask",
    "LanguageTask",
    "LoadedModel",
    "States",
    "Task",
    "anatomy_of",
    "load",
    "load_tokenizer",
    "model_folder",
    "own_images",
    "pinned",
]
