"""A model's chat template, rendered as transformers renders it (`apply_chat_template`), without transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_lens.base.errors import TargetError, one_line

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.parser import Parser

Messages = Sequence[Mapping[str, str]]  # role (system, user, assistant) and content
Renderer = Callable[[Messages], str]
CONFIG_FILE, GENERATION_FILE = "tokenizer_config.json", "generation_config.json"


@dataclass(frozen=True)
class ArtifactTokenizer:
    """Encodes and decodes text."""

    encode: Callable[[str], list[int]]  # recognises special tokens by their text; adds none
    begin: Callable[[str], list[int]]  # the same, plus the tokens that the tokenizer adds, such as <s>
    decode: Callable[[Sequence[int]], str]
    ends: frozenset[int]  # tokens that end a text or a turn; empty if unknown
    render: Renderer | None = None  # the chat template, if any


def default_template(template: Any) -> str | None:
    """The default of one or several named templates, in the form of tokenizer_config.json."""
    if isinstance(template, list):
        template = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) and template else None


def template_of(folder: Path) -> tuple[Path, str] | None:
    """The chat template in a tokenizer's files and the file that holds it, in the places where transformers looks."""
    for file in (folder / "chat_template.jinja", folder / CONFIG_FILE):
        if file.suffix == ".jinja":
            template = file.read_text(encoding="utf-8") if file.is_file() else None
        else:
            template = default_template(read_json(file).get("chat_template"))
        if template:
            return file, template
    return None


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
    return [one for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int)]


def read_json(path: Path) -> dict[str, Any]:
    """A settings file of a tokenizer; empty if there is none."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TargetError(f"{path} cannot be read: {error}; copy the tokenizer's files again") from error
    return data if isinstance(data, dict) else {}


def chat_renderer(template: str, special: Mapping[str, str], where: str) -> Renderer:
    """Messages → the text that the model reads, up to where its answer begins. `special`: texts of the
    special tokens that templates name (bos_token, eos_token); `where`: the template's file, for errors."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the text that training learns from; here only its content matters."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda how: datetime.now().strftime(how)

    def render(messages: Messages) -> str:
        try:
            return environment.from_string(template).render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None, **special
            )
        except Exception as error:  # a template is third-party code
            raise TargetError(f"{where}: its chat template fails: {one_line(error)}") from error

    return render
