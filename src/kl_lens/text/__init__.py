"""Text sources, token windows, and splits that never overlap."""

from kl_lens.text.documents import Document, TextSource
from kl_lens.text.sources import KNOWN_NAMES, open_text
from kl_lens.text.splits import refuse_overlap, split_documents
from kl_lens.text.tokens import TokenStream, token_stream
from kl_lens.text.wikitext import wikitext2
from kl_lens.text.windows import UsedDocument, Windows, draw_windows, evaluation_windows

__all__ = [
    "KNOWN_NAMES",
    "Document",
    "TextSource",
    "TokenStream",
    "UsedDocument",
    "Windows",
    "draw_windows",
    "evaluation_windows",
    "open_text",
    "refuse_overlap",
    "split_documents",
    "token_stream",
    "wikitext2",
]
