"""GGUF headers from strangers: what is wrong is said in one line; nothing is read that the header does not promise."""

import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="needs the extra gguf")

from kl_lens.base.errors import TargetError
from kl_lens.targets.gguf.header import read_header
from tests.hostile.saying import within_time

ROWS = 4
COLUMNS = 32


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content)) + content.encode()


def number(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def tensor(name: str, offset: int, columns: int = COLUMNS, kind: int = 0) -> bytes:
    return text(name) + struct.pack("<IQQIQ", 2, columns, ROWS, kind, offset)


def file_of(
    *parts: bytes,
    tensors: int = 2,
    keys: int = 1,
    magic: bytes = b"GGUF",
    room: int = 1024,
) -> bytes:
    header = magic + struct.pack("<IQQ", 3, tensors, keys) + b"".join(parts)
    return header + bytes(-len(header) % 32 + room)


SIZE = number("llama.block_count", 1)
FIRST = tensor("a", 0)
SECOND = tensor("b", 512)
LISTED = text("tokens") + struct.pack("<IIQ", 9, 8, 2**60)
BROKEN = {
    "not a GGUF file": file_of(SIZE, FIRST, SECOND, magic=b"GGML"),
    "ends inside its header": file_of(SIZE, FIRST, SECOND)[:100],
    f"announces {2**60} tensors": file_of(SIZE, FIRST, SECOND, tensors=2**60),
    f"announces {2**60} keys": file_of(SIZE, FIRST, SECOND, keys=2**60),
    f"{2**60} bytes are announced": file_of(struct.pack("<Q", 2**60)),
    f"a list of {2**60} texts": file_of(LISTED),
    "needs bytes up to": file_of(SIZE, FIRST, tensor("b", 1024)),
    f"up to {2**63}": file_of(SIZE, FIRST, tensor("b", 2**63 - 672)),
    "inside another": file_of(SIZE, FIRST, tensor("b", 256)),
    "or unaligned": file_of(SIZE, FIRST, tensor("b", 516), room=2048),
    "two tensors are called 'a'": file_of(SIZE, FIRST, tensor("a", 512)),
    "its key llama.block_count comes twice": file_of(SIZE, SIZE, FIRST, SECOND, keys=2),
    "40 columns, which blocks of 32 do not divide": file_of(
        SIZE, FIRST, tensor("b", 512, 40, 8)
    ),
    "a type that gguf does not know": file_of(SIZE, FIRST, tensor("b", 512, kind=99)),
    "is one of 3 parts; give all of them": file_of(
        number("split.count", 3), FIRST, SECOND
    ),
}


def test_the_headers_of_these_tests_are_sound_but_for_one_thing(tmp_path: Path) -> None:
    file = tmp_path / "sound.gguf"
    file.write_bytes(file_of(SIZE, FIRST, SECOND))
    info = read_header(file)
    assert [(entry.name, entry.shape) for entry in info.tensors] == [
        ("a", (ROWS, COLUMNS)),
        ("b", (ROWS, COLUMNS)),
    ]


@pytest.mark.parametrize("reason", BROKEN)
def test_what_is_wrong_is_said(reason: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(BROKEN[reason])
    with within_time(5, reason), pytest.raises(TargetError) as caught:
        read_header(file)
    assert reason in str(caught.value)
    assert str(file) in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_large_file_of_zeros_behind_an_absurd_count_ends_at_once(
    tmp_path: Path,
) -> None:
    file = tmp_path / "zeros.gguf"
    with file.open("wb") as out:
        out.write(b"GGUF" + struct.pack("<IQQ", 3, 2**28, 0))
        out.truncate(2**35)
    with within_time(5, "zeros"), pytest.raises(TargetError, match="two tensors are"):
        read_header(file)


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    part = tmp_path / "model-00001-of-00003.gguf"
    part.write_bytes(file_of(SIZE, FIRST, SECOND))
    with pytest.raises(TargetError, match=r"of 3 parts, and model-00002-of-00003\.gguf"):
        read_header(part)
    (tmp_path / "model-00002-of-00003.gguf").write_bytes(file_of(SIZE, FIRST, SECOND))
    (tmp_path / "model-00003-of-00003.gguf").write_bytes(file_of(SIZE, FIRST, SECOND))
    with pytest.raises(TargetError, match="two tensors are called 'a'"):
        read_header(part)


def flipped(content: bytearray, draw: random.Random, header: int) -> None:
    content[draw.randrange(header)] ^= 1 << draw.randrange(8)


def overwritten(content: bytearray, draw: random.Random, header: int) -> None:
    value = draw.choice([0, 1, 31, 255, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1])
    at = draw.randrange(header - 8)
    content[at : at + 8] = struct.pack("<Q", value)


def cut(content: bytearray, draw: random.Random, header: int) -> None:
    del content[draw.randrange(len(content)) :]


def moved(content: bytearray, draw: random.Random, header: int) -> None:
    start = draw.randrange(header)
    stretch = content[start : start + draw.randrange(1, 64)]
    at = draw.randrange(header)
    content[at : at + len(stretch)] = stretch


MUTATIONS: list[Callable[[bytearray, random.Random, int], None]] = [
    flipped,
    overwritten,
    cut,
    moved,
]


def test_500_mutated_headers(tmp_path: Path) -> None:
    """Each is refused in one line, or says only what lies inside the file."""
    lists = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3)
    tokens = text("x") + text("yy") + text("")
    alignment = number("general.alignment", 32)
    sound = file_of(SIZE, alignment, lists + tokens, FIRST, SECOND, keys=3)
    header = len(sound) - 1024
    draw = random.Random(0)
    file = tmp_path / "mutated.gguf"
    lines = []
    for case in range(500):
        content = bytearray(sound)
        draw.choice(MUTATIONS)(content, draw, header)
        file.write_bytes(content)
        try:
            with within_time(5, case):
                info = read_header(file, whole=bool(case % 2))
                info.contents()
        except TargetError as error:
            lines.append(str(error))
            continue
        ends = [entry.offset + entry.bytes for entry in info.tensors]
        assert max(ends, default=0) <= len(content), case
    assert 200 < len(lines) < 500
    assert all(line.isprintable() for line in lines)
