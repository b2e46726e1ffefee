"""What a GGUF file says about itself, what it is called, its parts, and that llama.cpp's own server talks sense."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers

from kl_lens.base.files import reference_path
from kl_lens.model.opening import LoadedModel, load
from kl_lens.run.records import Plan
from kl_lens.study.study import generate
from kl_lens.targets import (
    export,
    get_target,
    locate,
    open_session,
    read_artifact,
)
from kl_lens.targets.gguf.header import read_header
from tests.families import plain
from tests.shipped import shipped_digests
from tests.targets.gguf.support import small_mamba

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")

CARD = """---
license: apache-2.0
language:
- en
base_model: state-spaces/mamba2-130m
tags:
- chat
pipeline_tag: text-generation
---
# A card
"""
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny instruct model, as they lie on the hub."""
    folder = tmp_path_factory.mktemp("hub") / "Tiny-Mamba-Instruct-v0.2"
    tokenizer = transformers.AutoTokenizer.from_pretrained(reference_path("mamba"))
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|stop|>"]}
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.bos_token = "<|endoftext|>"
    small_mamba(vocab_size=len(tokenizer) + 5).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>", "<|stop|>"])
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": ends, "top_k": 20})
    )
    (folder / "README.md").write_text(CARD)
    return folder


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    export(plain(load(checkpoint)), Plan("p", {}, "test"), "gguf", folder)
    return folder


def test_general_metadata_and_template(exported: Path, checkpoint: Path) -> None:
    file = get_target("gguf").loaded_files(exported)[0]
    assert file.name == "Tiny-Mamba-292K-Instruct-v0.2-F16.gguf"
    said = read_header(file).metadata
    expected = {
        "general.type": "model",
        "general.name": "Tiny Mamba Instruct v0.2",
        "general.basename": "Tiny-Mamba",
        "general.size_label": "292K",
        "general.finetune": "Instruct",
        "general.version": "v0.2",
        "general.license": "apache-2.0",
        "general.base_model.count": 1,
        "general.base_model.0.name": "Mamba2 130m",
        "general.base_model.0.organization": "State Spaces",
        "general.base_model.0.repo_url": "https://huggingface.co/state-spaces/mamba2-130m",
        "general.sampling.top_k": 20,
        "tokenizer.chat_template": TEMPLATE,
        "tokenizer.ggml.add_bos_token": True,  # the chat template writes it
        "tokenizer.ggml.add_eos_token": False,
    }
    assert {key: said.get(key) for key in expected} == expected
    assert said["general.quantized_by"].startswith("KL Lens ")
    fields = gguf.GGUFReader(file).fields
    assert fields["general.tags"].contents() == ["chat", "text-generation"]
    assert fields["general.languages"].contents() == ["en"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    with open_session(exported, threads=1) as session:
        names = {tokenizer.convert_ids_to_tokens(end) for end in session.end_tokens}
    assert names == {"<|endoftext|>", "<|im_end|>", "<|stop|>"}


def test_names_by_the_convention(tmp_path: Path) -> None:
    model = small_mamba(name="owner/Mamba2-451k", hidden_size=256)
    embedding = "backbone.embeddings"
    mixed = {embedding: "q8_0", "backbone.layers.0.mixer.in_proj": "q4_k"}
    for plan, encoding in (
        (Plan("uniform_q8_0", {embedding: "q8_0"}, "test"), "Q8_0"),
        (Plan("stock.q4_k_m", {embedding: "q6_k"}, "test", family="stock"), "Q4_K_M"),
        (Plan("best", mixed, "test"), "KL-8.9bpw"),
    ):
        artifact = export(model, plan, "gguf", tmp_path)
        assert artifact.files == (f"Mamba2-451K-{encoding}.gguf",)
        assert [path.name for path in tmp_path.glob("*.gguf")] == list(
            artifact.files
        )  # the earlier one is gone
        said = read_header(tmp_path / artifact.files[0]).metadata
        assert (
            said["general.source.repo_url"] == "https://huggingface.co/owner/Mamba2-451k"
        )
        assert said["general.organization"] == "Owner"


def test_parts(checkpoint: Path, exported: Path, tmp_path: Path) -> None:
    target = get_target("gguf")
    artifact = export(
        plain(load(checkpoint)),
        Plan("p", {}, "test"),
        "gguf",
        tmp_path,
        part_bytes=30_000,
    )
    assert len(artifact.files) > 2
    assert (
        artifact.files[0]
        == f"Tiny-Mamba-292K-Instruct-v0.2-F16-00001-of-{len(artifact.files):05}.gguf"
    )
    sizes = [(tmp_path / name).stat().st_size for name in artifact.files]
    last = tmp_path / artifact.files[-1]
    assert (
        target.loaded_bytes(tmp_path)
        == target.loaded_bytes(last)
        == artifact.realised_bytes
        == sum(sizes)
    )
    whole = read_header(target.loaded_files(exported)[0])
    split = read_header(last)
    tensors = (
        [(t.name, t.shape, t.type) for t in info.tensors] for info in (whole, split)
    )
    assert next(tensors) == next(tensors)
    assert shipped_digests(tmp_path) == shipped_digests(exported)
    with (
        open_session(exported, threads=1) as one,
        open_session(last, threads=1) as several,
    ):
        assert (one.logits([1, 2, 3]) == several.logits([1, 2, 3])).all()
    assert locate(last)[0] == tmp_path
    assert target.beside(artifact) == {}, "Ollama takes no file in parts"
    whole_file = read_artifact(exported)
    assert target.beside(whole_file) == {"Modelfile": f"FROM ./{whole_file.files[0]}\n"}
    last.unlink()
    with pytest.raises(Exception, match=rf"{last.name}"):
        target.contents(tmp_path / artifact.files[0])


# In a process of its own: it is another llama.cpp than the sessions', and brings threads along.
SERVER = """
import json, sys, xllamacpp
answers = []
for path in sys.argv[1:]:
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = path, 512, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.port, params.verbosity = 0, 10
    server = xllamacpp.Server(params)
    common = {"temperature": 0, "max_tokens": 12, "cache_prompt": False}
    chat = {"messages": MESSAGES, **common}
    plain = {"prompt": "The history of the city", **common}
    answers.append([server.handle_chat_completions(chat), server.handle_completions(plain)])
print(json.dumps(answers))
"""
QUESTION = [{"role": "user", "content": "The history of the city"}]


def served(files: Sequence[Path], messages: Sequence[dict[str, str]]) -> Any:
    """For each file, the server's answers to a chat and to a text."""
    pytest.importorskip("xllamacpp")
    program = SERVER.replace("MESSAGES", json.dumps(messages))
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, files)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_llama_cpps_server_answers_as_generate_does(
    checkpoint: Path, exported: Path, tmp_path: Path
) -> None:
    model = LoadedModel(
        "chatty",
        checkpoint,
        transformers.AutoModelForCausalLM.from_pretrained(reference_path("mamba")),
        transformers.AutoTokenizer.from_pretrained(reference_path("mamba")),
    )
    model.tokenizer.chat_template = TEMPLATE
    artifact = export(model, Plan("p", {}, "test"), "gguf", tmp_path)
    file = tmp_path / artifact.files[0]
    [[chat, plain]] = served([file], QUESTION)
    flags = {"max_new_tokens": 12, "threads": 1}
    answer = generate(file, "The history of the city", chat=True, **flags).text
    assert chat["choices"][0]["message"]["content"].strip() == answer.strip()
    assert (
        plain["choices"][0]["text"]
        == generate(file, "The history of the city", **flags).text
    )


def _turns(before: str, after: str, end: str, beginning: str = "{{ bos_token }}") -> str:
    """A template whose turns look so, with ROLE in its place."""
    turn = before.replace("ROLE", "{{ m['role'] }}")
    answer = before.replace("ROLE", "assistant")
    return (
        f"{beginning}{{% for m in messages %}}{turn}{{{{ m['content'] | trim }}}}{after}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{answer}{{% endif %}}{end}"
    )


# How the families write chats: the marks of a turn, and what their templates compute.
TEMPLATES = {
    "llama": _turns("<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>", ""),
    "mistral": "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} "
    "[/INST]{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}",
    "qwen2": "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    + _turns("<|im_start|>ROLE\n", "<|im_end|>\n", "", ""),
    "qwen3": "{%- set ns = namespace(last=messages|length - 1) %}{%- for m in messages[::-1] %}{%- if m.role == 'user' "
    "%}{%- set ns.last = messages|length - 1 - loop.index0 %}{%- endif %}{%- endfor %}"
    + _turns("<|im_start|>ROLE\n", "<|im_end|>\n", "{{ ns.last }}<think>\n", ""),
    "gemma3": "{{ bos_token }}{%- for m in messages -%}{%- set role = 'model' if m['role'] == 'assistant' else "
    "m['role'] -%}{{ '<start_of_turn>' + role + '\n' + m['content'] | trim }}{{ '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}",
    "phi3": _turns("<|ROLE|>\n", "<|end|>\n", "", ""),
    "granite": _turns(
        "<|start_of_role|>ROLE<|end_of_role|>", "<|end_of_text|>\n", "", ""
    ),
    "olmo2": _turns("<|ROLE|>\n", "{{ '\n' if not loop.last else eos_token }}", ""),
    "smollm3": "{%- set today = 'today' -%}{{- '<|im_start|>system\n' + today ~ '<|im_end|>\n' -}}"
    + _turns("<|im_start|>ROLE\n", "<|im_end|>\n", "", ""),
}
CHAT = [
    {"role": "user", "content": " Where is it? {{ x }} é 🙂 "},
    {"role": "assistant", "content": "Here\nand there."},
    {"role": "user", "content": "Why?"},
]


@pytest.mark.slow
def test_a_chat_becomes_the_same_prompt(checkpoint: Path, tmp_path: Path) -> None:
    """By transformers, by llama.cpp's server and by KL Lens, in the ways of all families."""
    model = plain(load(checkpoint))
    files = []
    expected = []
    for name, template in TEMPLATES.items():
        model.tokenizer.chat_template = template
        artifact = export(model, Plan("p", {}, "test"), "gguf", tmp_path / name)
        files.append(tmp_path / name / artifact.files[0])
        prompt = model.tokenizer.apply_chat_template(
            CHAT, tokenize=False, add_generation_prompt=True
        )
        expected.append(prompt)
        with open_session(files[-1], threads=1) as session:
            assert session.tokenizer().render(CHAT) == prompt, name
    prompts = [chat["__verbose"]["prompt"] for chat, _ in served(files, CHAT)]
    begun = [prompt.removeprefix("<|endoftext|>") for prompt in expected]
    assert [prompt.removeprefix("<|endoftext|>") for prompt in prompts] == begun
