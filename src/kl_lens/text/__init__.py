"""Text sources, token windows, and splits that never overlap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kl_lens.base.lazy import lazy_names

if TYPE_CHECKING:
    from kl_lens.text.documents import Document as Document, TextSource as TextSource
    from kl_lens.text.overlap import refuse_overlap as refuse_overlap
    from kl_lens.text.sources import KNOWN_NAMES as KNOWN_NAMES, open_text as open_text
    from kl_lens.text.tokens import TokenStream as TokenStream, token_stream as token_stream
    from kl_lens.text.wikitext import wikitext2 as wikitext2
    from kl_lens.text.windows import (
        UsedDocument as UsedDocument,
        Windows as Windows,
        draw_windows as draw_windows,
        evaluation_windows as evaluation_windows,
    )
else:
    # Images are prepared on small devices too, without torch.
    __getattr__, __all__ = lazy_names(__name__)
