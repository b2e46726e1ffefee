"""The tokenizer of an exported model, without loading transformers where possible; it renders chat templates. Also
varied strings, to compare two implementations of a tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kl_lens.base.errors import TargetError, one_line
from kl_lens.base.files import damage
from kl_lens.targets.exporting import GENERATION_FILE
from kl_lens.targets.session import (
    ArtifactTokenizer,
    Messages,
    Renderer,
    Session,
    TokenizingSession,
)

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
_WORDS = (
    "the",
    "a",
    "of",
    "model",
    "state",
    "Mamba",
    "don't",
    "I'll",
    "we've",
    "they're",
    "naïve",
    "café",
    "Straße",
    "l'été",
    "mañana",
    "über",
    "İstanbul",
)
_CODE = (
    "def f(x: int) -> int:\n    return x ** 2\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]; }",
    '{"key": [1, 2.5e-3, null]}',
    "SELECT * FROM t WHERE x >= 10;",
    "#include <vector>\n",
    "x = y if z else w  # note",
    '<div class="a">&nbsp;</div>',
    "\tif err != nil {\n\t\treturn err\n\t}\n",
    "https://example.org/a?b=c&d=%20e",
    "C:\\path\\to\\file.txt",
    "-----",
    "===",
    "!!!???",
    "...",
)
_SCRIPTS = (
    "今天天气很好",
    "言語モデルは面白いです",
    "안녕하세요",
    "مرحبا بالعالم",
    "שלום עולם",
    "Привет, мир",
    "Γεια σου",
    "नमस्ते",
    "สวัสดีชาวโลก",
    "e\u0301a\u0308n\u0303",  # the last: combining accents
)
_EMOJI = ("😀", "🎉🎊", "👩\u200d💻", "🇩🇪", "👍🏽", "❤\ufe0f", "🫠")
_SPACES = (
    " ",
    "  ",
    "   ",
    " " * 7,
    " " * 17,
    "\t",
    "\t\t",
    "\n",
    "\n\n",
    "\n\n\n",
    "\r\n",
    " \n ",
    "\u00a0",
    "\u3000",
    "\u2009",
)
_MARKS = ".,;:!?'\"()[]{}<>/\\|@#$%^&*-_=+~`"


def find_tokenizer(
    session: Session | None, artifact: Path, source: str | None = None
) -> ArtifactTokenizer:
    """The tokenizer of an exported folder or a bare file; llama.cpp's sessions can tokenize by themselves.

    `source`: a folder, a tokenizer.json or a hub id (for which transformers loads) to use instead.
    """
    if (file := _file(artifact, source)) is not None:
        return _from_file(file)
    if source:
        return _from_transformers(source)
    if not isinstance(session, TokenizingSession):
        raise TargetError(f"{artifact} holds no tokenizer; pass one with --tokenizer")
    return session.tokenizer()


class VocabularyTokenizer:
    """The vocabulary inside a file, read by its runtime, with the part of transformers' interface that we use."""

    bos_token_id = None

    def __init__(self, vocabulary: ArtifactTokenizer) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id = min(vocabulary.ends, default=None)

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        encode = self._vocabulary.begin if add_special_tokens else self._vocabulary.encode
        return encode(text)

    def decode(self, ids: list[int], **_: Any) -> str:
        return self._vocabulary.decode(ids)

    def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text, **options) for text in texts]}


def artifact_tokenizer(
    artifact: Path, opened: Callable[[], Session], source: str | None = None
) -> Any:
    """The tokenizer for evaluation: transformers' own, which knows special tokens too, or the file's vocabulary."""
    beside = _file(artifact, None)
    if chosen := source or (beside and beside.parent):
        from kl_lens.model import load_tokenizer

        return load_tokenizer(artifact, chosen, trust_remote_code=False)
    session = opened()
    try:
        return VocabularyTokenizer(find_tokenizer(session, artifact))
    except TargetError:
        session.close()
        raise


def _file(artifact: Path, source: str | None) -> Path | None:
    """The tokenizer's file: the given one, or the one in the given folder."""
    path = Path(source) if source else artifact
    if path.suffix == ".json":
        return path
    if path.suffix == ".txt":
        return None
    folder = path.parent if path.is_file() else path
    return folder / TOKENIZER_FILE if (folder / TOKENIZER_FILE).is_file() else None


def _from_file(path: Path) -> ArtifactTokenizer:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise TargetError(
            f"{path} cannot be read as a tokenizer: {error}; use --tokenizer"
        ) from error
    folder = path.parent
    special = special_texts(folder)
    template = template_of(folder)
    cleaned = read_json(folder / CONFIG_FILE).get("clean_up_tokenization_spaces")
    if (
        cleaned
        and path.name == TOKENIZER_FILE
        and type(tokenizer.model).__name__ != "BPE"
    ):
        return _from_transformers(str(folder))  # only it knows which spaces to clean up
    # A file may hold truncation limits from training; prompts are not truncated.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end = tokenizer.token_to_id(special.get("eos_token", ""))
    return ArtifactTokenizer(
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        begin=lambda text: list(tokenizer.encode(text).ids),
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
        ends=frozenset([*end_ids(folder), *([] if end is None else [end])]),
        render=template and chat_renderer(template[1], special, str(template[0])),
    )


def _from_transformers(source: str) -> ArtifactTokenizer:
    from kl_lens.model import load_tokenizer

    tokenizer: Any = load_tokenizer(Path(source), source, trust_remote_code=False)
    end = tokenizer.eos_token_id
    template = default_template(tokenizer.chat_template)
    return ArtifactTokenizer(
        encode=partial(tokenizer.encode, add_special_tokens=False),
        begin=tokenizer.encode,
        decode=lambda ids: str(tokenizer.decode(list(ids))),
        ends=frozenset() if end is None else frozenset([int(end)]),
        render=chat_renderer(template, tokenizer.special_tokens_map, source)
        if template
        else None,
    )


def default_template(template: Any) -> str | None:
    """The default of one or several named templates, in the form of tokenizer_config.json."""
    if isinstance(template, list):
        template = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) and template else None


def template_of(folder: Path) -> tuple[Path, str] | None:
    """The chat template in a tokenizer's files and the file that holds it, in the places where transformers looks."""
    if (file := folder / "chat_template.jinja").is_file() and (
        text := file.read_text(encoding="utf-8")
    ):
        return file, text
    file = folder / CONFIG_FILE
    template = default_template(read_json(file).get("chat_template"))
    return (file, template) if template else None


def special_texts(folder: Path) -> dict[str, str]:
    """bos_token, eos_token and the like → text."""
    texts: dict[str, str] = {}
    for name in ("special_tokens_map.json", CONFIG_FILE):
        for key, token in read_json(folder / name).items():
            if isinstance(token, dict):  # an added-token entry with its matching options
                token = token.get("content")
            if key.endswith("_token") and isinstance(token, str):
                texts[key] = token
    return texts


def end_ids(folder: Path) -> list[int]:
    """Tokens that end a text, from the model's generation settings."""
    ids = read_json(folder / GENERATION_FILE).get("eos_token_id")
    return [
        token
        for token in (ids if isinstance(ids, list) else [ids])
        if isinstance(token, int)
    ]


def read_json(path: Path) -> dict[str, Any]:
    """A settings file of a tokenizer; empty if there is none."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TargetError(
            f"{path} {damage(path)} (not valid JSON: {one_line(error)})"
        ) from error
    return data if isinstance(data, dict) else {}


def chat_renderer(template: str, special: Mapping[str, Any], source: str) -> Renderer:
    """Messages → the text that the model reads, up to where its answer begins. `special`: texts of the
    special tokens that templates name (bos_token, eos_token); `source`: the template's file, for errors."""

    def render(messages: Messages) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        conversation: Any = list(messages)
        try:
            rendered: Any = render_jinja_template(
                [conversation],
                chat_template=template,
                add_generation_prompt=True,
                **special,
            )
        except Exception as error:  # a template is third-party code
            raise TargetError(
                f"{source}: its chat template fails: {one_line(error)}"
            ) from error
        return str(rendered[0][0])

    return render


def varied_strings(
    count: int, *, special: Sequence[str] = (), seed: int = 0
) -> list[str]:
    """Words, code, numbers, emoji, several scripts, runs of spaces and the given special tokens, mixed at random."""
    draw = random.Random(seed)
    kinds = [
        lambda: draw.choice(_WORDS),
        lambda: draw.choice(_WORDS).upper(),
        lambda: " ".join(draw.choices(_WORDS, k=draw.randint(2, 8))),
        lambda: draw.choice(_CODE),
        lambda: str(draw.randrange(10 ** draw.randint(1, 12))),
        lambda: f"{draw.uniform(-1e6, 1e6):.{draw.randint(0, 6)}f}",
        lambda: f"{draw.randrange(10**7):,}",
        lambda: draw.choice(_EMOJI),
        lambda: draw.choice(_SCRIPTS),
        lambda: draw.choice(_SPACES),
        lambda: draw.choice(_MARKS) * draw.randint(1, 4),
        lambda: "".join(
            draw.choices(
                "abcdefghijklmnopqrstuvwxyzABCDEFXYZ0123456789", k=draw.randint(1, 12)
            )
        ),
        lambda: chr(
            draw.choice((draw.randrange(0x20, 0x250), draw.randrange(0x370, 0x3000)))
        ),
    ]
    if special:
        kinds.append(lambda: draw.choice(special))
    return [
        "".join(
            draw.choice(kinds)() + draw.choice(("", " "))
            for _ in range(draw.randint(1, 10))
        )
        for _ in range(count)
    ]


def other_ids(actual: Sequence[int], expected: Sequence[int], tokenizer: Any) -> str:
    """Where two lists of ids for one text part, in words."""
    pairs = zip_longest(actual, expected)
    start = next(i for i, (token, wanted) in enumerate(pairs) if token != wanted)
    tokens, right = (list(ids[start : start + 4]) for ids in (actual, expected))
    return f"{tokenizer.decode(right)!r} becomes {tokens}, not {right}"
