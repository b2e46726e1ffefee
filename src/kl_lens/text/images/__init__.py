"""Image sources, and how a model wants its images. Only `windows.py` needs torch."""

from kl_lens.text.images.album import Picture, add_picture, labels_of, pixels_of
from kl_lens.text.images.preparing import Preparation
from kl_lens.text.images.sources import DIGITS, ImageSource, open_images

__all__ = [
    "DIGITS",
    "ImageSource",
    "Picture",
    "Preparation",
    "add_picture",
    "labels_of",
    "open_images",
    "pixels_of",
]
