"""`kl-lens generate --chat`: turns by the model's template, with one session's state, for every target."""

import io
from pathlib import Path
from typing import Any

import pytest
import transformers

from kl_lens.base.errors import TargetError
from kl_lens.base.files import reference_path
from kl_lens.cli.main import main
from kl_lens.run.records import Plan
from kl_lens.targets import export, open_session
from kl_lens.targets.tokenizer import chat_renderer
from tests.cli.commands import done, refused
from tests.families import _COMMON
from tests.targets.gguf.support import tiny

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("openvino", reason="needs the extra openvino")

TEMPLATE = (
    "{%- for m in messages %}\n{% if m['role'] == 'user' %}\nQ: {{ m['content'] | trim }}\n{% else %}\n"
    "A:{{ m['content'] }}{{ eos_token }}\n{% endif %}\n{% endfor %}\n{% if add_generation_prompt %}A:{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(reference_path("mamba"))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    settings = {
        **_COMMON,
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 1,
        "state_size": 8,
    }
    model = tiny(transformers.MambaConfig(**settings), tokenizer)
    folder = tmp_path_factory.mktemp("chat")
    for target in ("gguf", "openvino"):
        export(model, Plan("p", {}, made_by="test"), target, folder / target)
    return folder


def _expected(folder: Path, tokenizer: Any, lines: list[str], count: int) -> list[str]:
    """Every turn read from the beginning, rendered and tokenized by transformers."""
    messages: list[dict[str, str]] = []
    with_state = open_session(folder, threads=1)
    for line in lines:
        messages.append({"role": "user", "content": line})
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        with_state.reset()
        logits = with_state.prefill(
            tokenizer(text, add_special_tokens=False)["input_ids"]
        )
        new: list[int] = []
        while (
            len(new) < count and (token := int(logits.argmax())) != tokenizer.eos_token_id
        ):
            new.append(token)
            logits = with_state.step(token)
        messages.append({"role": "assistant", "content": tokenizer.decode(new)})
    with_state.close()
    return [message["content"] for message in messages if message["role"] == "assistant"]


@pytest.mark.parametrize("target", ["gguf", "openvino"])
def test_a_conversation(
    target: str, exported: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """All turns from the input until /quit; or the first from --prompt, until the input ends."""
    lines = ["Who built it?", "And when? naïve 🙂", "Why"]
    typed = (
        [lines[0], "", *lines[1:], "/quit", "never read"]
        if target == "gguf"
        else lines[1:]
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(typed)))
    flags = ["--chat", "--max-new-tokens", "6", "--threads", "1"]
    first = [] if target == "gguf" else ["--prompt", lines[0]]
    done(f"generate {exported / target}", flags, first)
    answers = _expected(exported / target, tokenizer, lines, 6)
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in answers)


def test_without_a_template_one_line_says_so(tmp_path: Path, capsys) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(reference_path("mamba"))
    settings = {
        **_COMMON,
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 1,
        "state_size": 8,
    }
    export(
        tiny(transformers.MambaConfig(**settings), tokenizer),
        Plan("p", {}, "test"),
        "gguf",
        tmp_path,
    )
    assert main(f"generate {tmp_path} --chat".split()) == 1
    message = capsys.readouterr().err.strip()
    assert message.endswith(
        "has no chat template; give it a text with --prompt TEXT instead"
    )
    assert "\n" not in message
    assert "give --prompt some text to go on from, or --chat" in refused(
        capsys, f"generate {tmp_path}"
    )


def test_templates_are_rendered_as_transformers_renders_them(tokenizer: Any) -> None:
    templates = [
        TEMPLATE,
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}{{ bos_token }}",
        "{{ tools is none }} {{ messages[0]['content'].strip() }} {{ strftime_now('%Y') }}",
    ]
    messages = [
        {"role": "user", "content": " naïve <b>\n"},
        {"role": "assistant", "content": "yes"},
    ]
    for template in templates:
        expected = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        assert (
            chat_renderer(template, tokenizer.special_tokens_map, "here")(messages)
            == expected
        )
    with pytest.raises(
        TargetError, match=r"x\.gguf: its chat template fails: no tools here"
    ):
        chat_renderer("{{ raise_exception('no tools here') }}", {}, "x.gguf")(messages)
    with pytest.raises(TargetError, match="its chat template fails"):
        chat_renderer(
            "{{ messages.__class__.__mro__[1].__subclasses__() }}{{ undefined.x }}",
            {},
            "x",
        )(messages)
