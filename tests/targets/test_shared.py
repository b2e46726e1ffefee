"""What targets share, one small case after the other."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from kl_lens.base.errors import TargetError
from kl_lens.base.files import bytes_digest
from kl_lens.targets.dissection import (
    Part,
    Texts,
    arrangements,
    other_texts,
    rounding,
    same,
    setting,
)
from kl_lens.targets.exporting import (
    UNPLANNED,
    Entry,
    Piece,
    file_size,
    floating,
    write_file,
    write_settings,
)
from kl_lens.targets.session import ALL_LAYERS, SessionSettings, checked_tokens
from kl_lens.targets.tokenizer import other_ids, varied_strings


def test_a_file_of_tensors_is_aligned_and_its_size_known(tmp_path: Path) -> None:
    numbers = np.arange(6, dtype=np.int32).reshape(2, 3)
    path = tmp_path / "model.safetensors"
    whole = Piece(
        "c", (Entry("b", "I32", (2, 3)),), UNPLANNED, "int8", lambda: ([numbers], "w")
    )
    values = torch.tensor([1.0, 1 / 3, 70000.0])
    exact = floating("n", "norm", (3,), lambda: values, half=False)
    halved = floating("h", "half", (2,), lambda: values[:2], half=True)
    records = write_file(path, [halved, whole, exact], "pt")
    assert path.stat().st_size == file_size([halved, whole, exact], "pt")
    stored = load_file(path)
    np.testing.assert_array_equal(stored["b"], numbers)
    assert (stored["norm"] == values.numpy()).all()
    assert stored["half"].dtype == np.float16
    assert [r.realised for r in records] == ["int8", "fp32", "fp16"]  # wide types first
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert header % 8 == 0
    with pytest.raises(TargetError, match="norm: has values that F16 cannot hold"):
        write_file(path, [floating("n", "norm", (3,), lambda: values, half=True)], "pt")
    infinite = floating("m", "mask", (1,), lambda: torch.tensor([-torch.inf]), half=True)
    write_file(path, [infinite], "pt")


def test_settings_are_written_alike_every_time(tmp_path: Path) -> None:
    write_settings(tmp_path, {"b": 1, "a": {"c": "é"}})
    expected = '{\n  "a": {\n    "c": "\\u00e9"\n  },\n  "b": 1\n}\n'
    assert (tmp_path / "config.json").read_text() == expected


@pytest.mark.parametrize(
    ("settings", "unusual", "label"),
    [
        ({}, {}, "CPU"),
        ({"threads": 3, "context": 9}, {}, "CPU"),
        ({"gpu_layers": ALL_LAYERS - 1}, {"gpu_layers": ALL_LAYERS - 1}, "GPU"),
        ({"gpu_layers": ALL_LAYERS}, {"gpu_layers": "all"}, "GPU"),
        ({"device": "NPU", "exact": True}, {"device": "NPU", "exact": True}, "NPU"),
    ],
)
def test_a_result_names_the_settings_that_change_it(
    settings: dict[str, Any], unusual: dict[str, Any], label: str
) -> None:
    chosen = SessionSettings(**settings)
    assert (chosen.unusual, chosen.label) == (unusual, label)


def test_tokens_are_those_of_the_vocabulary() -> None:
    assert checked_tokens([0, 96], 97, "file") == [0, 96]
    for ids, message in (([], "give at least one"), ([97], "token 97"), ([-1], "-1")):
        with pytest.raises(TargetError, match=message):
            checked_tokens(ids, 97, "file")


class _Letters:
    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_strings_that_compare_tokenizers_stay_the_same() -> None:
    """docs/targets.md has a table that was made with them."""
    strings = varied_strings(300, special=["<s>"])
    text = np.frombuffer("\0".join(strings).encode(), np.uint8)
    assert bytes_digest(text) == "f6ab0830cd107dca90d5032facfea962"
    words = other_ids(
        [97, 98, 1, 2, 3, 4, 5], [97, 98, 99, 100, 101, 102, 103], _Letters()
    )
    assert words == "'cdef' becomes [1, 2, 3, 4], not [99, 100, 101, 102]"
    assert other_ids([97], [97, 98], _Letters()) == "'b' becomes [], not [98]"


@pytest.mark.parametrize(
    ("actual", "expected", "equal"),
    [
        (1, 1, True),
        ("a", "b", False),
        (1e-5, 1.000001e-5, True),
        (1e-5, 1.001e-5, False),
        ([4, 0, 4], 4, True),
        (4, [4, 0], True),
        ([4, 5], 4, False),
        ([1, 2], [1, 2], True),
        ([1, 2], [2, 1], False),
    ],
)
def test_settings_that_mean_the_same(actual: Any, expected: Any, equal: bool) -> None:
    assert same(actual, expected) == equal


def test_a_disagreement_shows_both_values() -> None:
    assert setting("eps", 0.25, None).words == (
        "eps is 0.25 in the file, missing in the original"
    )
    shown = setting("long", "x" * 60, "y" * 61).words
    assert shown == f"long is {'x' * 60} in the file, {'y' * 59}… in the original"


def test_texts_of_two_tokenizers() -> None:
    original = Texts(
        {"token": {0: "a", 1: "b"}, "merge": {0: "a b"}},
        {"normalizer": "NFC"},
        {"eos_token_id": 1, "bos_token_id": 2},
        "{{ messages }} twice",
    )
    changed = Texts(
        {"token": {0: "a", 1: "c", 2: "d"}, "merge": {0: "a b", 1: "b a"}},
        {"normalizer": "NFD"},
        {"eos_token_id": [1], "bos_token_id": 3},
        "{{  messages }} once",
    )
    assert not list(other_texts(original, original, lambda *_: ""))
    words = [d.words for d in other_texts(changed, original, lambda *_: "")]
    assert [line.partition(":")[0] for line in words] == [
        "1 of 2 tokens are not the original's",
        "1 of 1 merges are not the original's",
        "normalizer is NFD in the file, NFC in the original",
        "bos_token_id is 3 in the file, 2 in the original",
        "the chat template was changed",
    ]
    assert words[-1].endswith("it has 'once' where the original's has 'twice'")


@pytest.mark.parametrize("change", range(4))
def test_the_way_into_a_file_and_back(change: int) -> None:
    maps = [lambda v: v, lambda v: v + 1, torch.exp, lambda v: -torch.exp(v)]
    parameter = torch.linspace(-1, 1, 12).reshape(4, 3)
    stored = maps[change](parameter.T).reshape(2, 6)
    sound = (parameter, (2, 6), lambda: stored, True)
    damaged = (parameter, (2, 6), lambda: 9 - stored, True)
    _, arrange, _ = arrangements([damaged, sound, sound])
    part = Part("stored", None, "parameter", arrange)
    assert torch.equal(part.expected(parameter), stored)
    written = part.written(stored, torch.zeros(4, 3))
    torch.testing.assert_close(written, parameter)
    assert part.written(stored[:1], parameter) is None


def test_rounding_of_what_fills_no_block() -> None:
    values = torch.linspace(-1, 1, 64).reshape(8, 8)
    rounded = rounding("q8_0")
    assert rounded is not None
    assert 0 < float((rounded(values) - values).abs().max()) < 0.01  # in one row
    odd = values[:3]
    assert torch.equal(rounded(odd), odd)
    assert rounding("") is None
    half = rounding("fp16")
    assert half is not None
    assert torch.equal(half(values), values.half().float())
