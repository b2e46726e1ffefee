"""A GGUF file running in llama.cpp."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from kl_lens.base.errors import TargetError, printable
from kl_lens.base.system import processors
from kl_lens.targets.exporting import earlier_artifact
from kl_lens.targets.gguf.header import read_header
from kl_lens.targets.gguf.library import find_library
from kl_lens.targets.gguf.paging import (
    ProgressCallback,
    can_give_back,
    give_back,
    giving_back,
    set_apart,
)
from kl_lens.targets.gguf.tokenizer import (
    PREFIX,
    SPECIAL,
    TOKENIZER_CHECK,
    differing_string,
)
from kl_lens.targets.session import (
    CACHES,
    LOAD_MODES,
    ArtifactTokenizer,
    Logits,
    SessionSettings,
    TokenizingSession,
)
from kl_lens.targets.tokenizer import chat_renderer
from kl_lens.weights.formats.ggml_types import ggml_types

# Tokens in one call of llama_decode. llama.cpp keeps the logits of all of them, so this bounds that memory.
BATCH = 512
# Attention caches are allocated for the whole context at once; state-space layers have no such limit.
LARGEST_CONTEXT = 8192
AUTO = "auto"
FREE_SHARE = 0.9  # most of the free memory that weights may take


class GGUFSession(TokenizingSession):
    """One sequence at a time through llama.cpp.

    Prompts and single tokens go through different kernels in llama.cpp, whose results differ in the last bits:
    `prefill` and `logits` use the first, `step` the second.

    llama.cpp aborts on some damaged files: open files from elsewhere with `kl_lens.open_session`, which tries them in
    another process first.

    Args:
        path: the .gguf file, or one of its parts.
        settings: `load` is one of `LOAD_MODES`. `auto` is `lean` (`read` where that is not possible), which keeps only
            the copy that kernels use. A file larger than free memory is mapped without repacking.
            `exact`: keys and values in F32 and no flash attention, to measure only the loss of a plan. llama.cpp's
            default rounds them to F16, and its CPU flash attention also sums in F16.
    """

    def __init__(
        self,
        path: Path,
        settings: SessionSettings,
        caches: Mapping[str, str] | None = None,
    ) -> None:
        """`caches`: keys and values → formats of llama.cpp's --cache-type-k and -v, where they are not F16."""
        self._context: int | None = None
        self._model: int | None = None
        self._settings = settings
        self.file = read_header(path)
        self._library = find_library()
        self._caches = dict(caches or {})
        self.path = self.file.paths[0]
        self.threads = processors() if settings.threads is None else settings.threads
        if settings.gpu_layers:
            self._library.require_gpu(settings.gpu_layers)
        if settings.load != AUTO and settings.load not in LOAD_MODES:
            raise TargetError(
                f"--load {settings.load}: unknown; choose from {', '.join((AUTO, *LOAD_MODES))}"
            )
        if self.threads < 1:
            raise TargetError(f"threads must be at least 1, not {self.threads}")
        self.load = settings.load if settings.load != AUTO else self._fitting_load()
        self._load()
        functions = self._library.functions
        self.endless = bool(functions.llama_model_is_recurrent(self._model))
        self._vocab = functions.llama_model_get_vocab(self._model)
        self.vocabulary = int(functions.llama_vocab_n_tokens(self._vocab))
        trained = int(functions.llama_model_n_ctx_train(self._model))
        longest = min(trained, LARGEST_CONTEXT, self.file.short_context or trained)
        self._make_context(settings.context or max(longest, 1))

    def _fitting_load(self) -> str | None:
        if not self._library.has_load_modes:
            return None
        size = sum(path.stat().st_size for path in self.file.paths)
        if size >= FREE_SHARE * psutil.virtual_memory().available:
            return "mapped-plain"
        return "lean" if can_give_back else "read"

    def _load(self) -> None:
        self._require_types()
        self._library.errors.clear()
        lean = (
            ProgressCallback(giving_back(self.file.paths))
            if self.load == "lean"
            else None
        )
        parameters = self._library.model_parameters(
            self._settings.gpu_layers, self.load, lean
        )
        load = self._library.functions.llama_model_load_from_file
        self._model = load(os.fsencode(self.path), parameters)
        if lean is not None:
            give_back(self.file.paths)
            set_apart(self.file.tensors)
        if not self._model:
            raise TargetError(
                f"{self.path}: llama.cpp cannot load it: {self._complaint()}"
            )

    def _require_types(self) -> None:
        names = {tensor.type: tensor.name for tensor in self.file.tensors}
        for kind in ggml_types().values():
            if kind.name in names and not self._library.knows(kind):
                raise TargetError(
                    f"{self.path}: this llama.cpp ({self._library.version}) does not know {kind.name}, the type of "
                    f"{names[kind.name]}; take a newer one, or plan with --formats that it has"
                )

    def _make_context(self, wanted: int) -> None:
        functions = self._library.functions
        self._batch_size = min(BATCH, wanted)
        sequences = self._settings.batch
        exact = self._settings.exact
        parameters = self._library.context_parameters(
            wanted * sequences, self._batch_size, exact, sequences, self._caches
        )
        self._context = functions.llama_init_from_model(self._model, parameters)
        if not self._context:
            message = self._complaint()
            self.close()
            raise TargetError(
                f"{self.path}: llama.cpp cannot make a context of {wanted}: {message}"
            )
        functions.llama_set_n_threads(self._context, self.threads, self.threads)
        self.context = int(functions.llama_n_ctx(self._context)) // sequences
        self._batch = functions.llama_batch_init(self._batch_size, 0, 1)
        self._position = 0

    @property
    def description(self) -> dict[str, Any]:
        library = self._library
        gpu_layers = self._settings.gpu_layers
        return {
            "runtime": "llama.cpp",
            "library": str(library.path.name),
            "found": library.origin,
            "version": library.version,
            "build_flags": library.system_info,
            "gpu_support": library.has_gpu,
            "device": "GPU" if gpu_layers else "CPU",
            "gpu_layers": gpu_layers,
            "threads": self.threads,
            "context": self.context,
            "attention": "F32, plain"
            if self._settings.exact
            else "the library's default (F16 cache, flash)",
            **(
                {} if self._settings.exact or not self._caches else {CACHES: self._caches}
            ),
            "load_mode": self.load or "the library's default",
            "file": self.path.name,
            "architecture": self.file.architecture,
        }

    def reset(self) -> None:
        if not self._context:
            raise self.closed()
        functions = self._library.functions
        functions.llama_memory_clear(functions.llama_get_memory(self._context), True)
        self._position = 0

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Includes those that llama.cpp knows by their text, such as `<|im_end|>`."""
        ends = self._library.functions.llama_vocab_is_eog
        return frozenset(
            token for token in range(self.vocabulary) if ends(self._vocab, token)
        )

    def tokenize(self, text: str, *, begin: bool = False) -> list[int]:
        """llama.cpp's own tokenization with the file's vocabulary."""
        self.require_vocabulary()
        data = text.encode()
        room = len(data) + 8
        tokens = (ctypes.c_int32 * room)()
        count = self._library.functions.llama_tokenize(
            self._vocab, data, len(data), tokens, room, begin, True
        )
        if count < 0:
            raise TargetError(f"{self.path}: llama.cpp could not tokenize {text[:40]!r}")
        return list(tokens[:count])

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens, with the vocabulary inside the file; an incomplete character becomes U+FFFD.

        One by one, as llama.cpp's server does: its function for whole texts drops spaces before punctuation.
        """
        self.require_vocabulary()
        return b"".join(self._piece(token, special) for token in tokens).decode(
            "utf-8", errors="replace"
        )

    def _piece(self, token: int, special: bool) -> bytes:
        room = 64
        for _ in range(2):
            text = ctypes.create_string_buffer(room)
            length = self._library.functions.llama_token_to_piece(
                self._vocab, token, text, room, 0, special
            )
            if length >= 0:
                return text.raw[:length]
            room = -length  # llama.cpp says how much it needs
        raise TargetError(
            f"{self.path}: llama.cpp could not convert token {token} to text"
        )

    def tokenizer(self) -> ArtifactTokenizer:
        self.require_vocabulary()
        template = self.file.metadata.get("tokenizer.chat_template")
        special = {}
        for key, name in SPECIAL.items():
            token = self.file.metadata.get(f"{PREFIX}{key}_token_id")
            text = "" if token is None else self.detokenize([token], special=True)
            special[f"{name}_token"] = text
        return ArtifactTokenizer(
            encode=self.tokenize,
            begin=partial(self.tokenize, begin=True),
            decode=self.detokenize,
            ends=self.end_tokens,
            render=chat_renderer(template, special, str(self.path))
            if isinstance(template, str)
            else None,
        )

    def close(self) -> None:
        functions = self._library.functions
        if self._context:
            functions.llama_batch_free(self._batch)
            functions.llama_free(self._context)
            self._context = None
        if self._model:
            functions.llama_model_free(self._model)
        self._model = None

    def __del__(self) -> None:
        if hasattr(self, "_library"):
            self.close()

    @property
    def has_vocabulary(self) -> bool:
        return self.file.metadata.get("tokenizer.ggml.model", "no_vocab") not in (
            "no_vocab",
            "none",
        )

    def require_vocabulary(self) -> None:
        """llama.cpp aborts the process if it has to tokenize without a vocabulary."""
        if not self.has_vocabulary:
            raise TargetError(
                f"{self.path} holds no tokenizer; pass one with --tokenizer"
            )

    def feed(self, tokens: list[int], *, every: bool) -> Logits:
        if not (context := self._context):  # check first: closing frees the batch
            raise self.closed()
        if not self.endless and self._position + len(tokens) > self.context:
            count = self._position + len(tokens)
            raise TargetError(
                f"{self.path}: {count} tokens do not fit into the context of {self.context}"
            )
        rows = np.empty((len(tokens) if every else 1, self.vocabulary), np.float32)
        filled = 0
        for start in range(0, len(tokens), self._batch_size):
            chunk = tokens[start : start + self._batch_size]
            last = start + len(chunk) == len(tokens)
            wanted = range(len(chunk)) if every else ([len(chunk) - 1] if last else [])
            self._decode(context, chunk, set(wanted))
            for index in wanted:
                rows[filled] = self._logits_of(context, index)
                filled += 1
        return rows

    def _decode(self, context: int, chunk: list[int], wanted: set[int]) -> None:
        batch = self._batch
        batch.n_tokens = len(chunk)
        for index, token in enumerate(chunk):
            batch.token[index] = token
            batch.pos[index] = self._position + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = index in wanted
        self._library.errors.clear()
        status = self._library.functions.llama_decode(context, batch)
        if status != 0:
            raise TargetError(
                f"{self.path}: llama_decode failed with {status}: {self._complaint()}"
            )
        self._position += len(chunk)

    def _logits_of(self, context: int, index: int) -> Logits:
        pointer = self._library.functions.llama_get_logits_ith(context, index)
        if not pointer:
            raise TargetError(f"{self.path}: llama.cpp returned no logits")
        return np.ctypeslib.as_array(pointer, (self.vocabulary,))

    def _complaint(self) -> str:
        lines = [line for line in self._library.errors if line]
        return printable(lines[0]) if lines else "it gave no reason"


def open_session(path: Path, **settings: Any) -> GGUFSession:
    """`settings`: fields of `SessionSettings`."""
    return GGUFSession(path, SessionSettings(**settings))


def try_out(path: Path) -> None:
    """For `quarantine`: opens a file and uses all of it. In an exported folder, text must be split as recorded."""
    artifact = earlier_artifact(path)
    with open_session(
        path / artifact.files[0] if artifact else path, threads=1
    ) as session:
        logits = session.prefill([0, min(1, session.vocabulary - 1)])
        session.step(int(logits.argmax()))
        if not session.has_vocabulary:
            return
        session.detokenize(session.tokenize("The history of 12 cities."))
        check = artifact.settings.get(TOKENIZER_CHECK) if artifact else None
        if check and (text := differing_string(session.tokenize, check)) is not None:
            pre = session.file.metadata.get("tokenizer.ggml.pre")
            raise TargetError(
                f"{session.path}: llama.cpp's tokenizer ({pre}) splits text unlike the model's; export with "
                f"--without-tokenizer, for use with token ids. First difference: {text[:60]!r}"
            )
