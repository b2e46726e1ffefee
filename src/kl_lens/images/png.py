"""Plain PNG files without a library: eight bits, grey or colour, with or without alpha, not interlaced.

Where Pillow is installed it reads everything, faster; without it this much is enough to begin with.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from kl_lens.images.album import Pixels

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # by colour type
_MOST = 2**26  # pixels: more is a damaged header


def read_png(content: bytes) -> Pixels | None:
    """(height, width, 1 or 3) without alpha; None for what is not a plain PNG. ValueError for one that is damaged."""
    if not content.startswith(SIGNATURE):
        return None
    header, data, place = b"", b"", len(SIGNATURE)
    while place + 8 <= len(content):
        size, kind = struct.unpack_from(">I4s", content, place)
        body = content[place + 8 : place + 8 + size]
        header = body if kind == b"IHDR" else header
        data += body if kind == b"IDAT" else b""
        place += size + 12
    if len(header) != 13:
        raise ValueError("no header")
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    if depth != 8 or colour not in _CHANNELS or interlaced:
        return None
    if not 0 < width * height <= _MOST:
        raise ValueError(f"{width} × {height} pixels")
    channels = _CHANNELS[colour]
    try:
        raw = zlib.decompressobj().decompress(data, height * (width * channels + 1))
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(raw) != height * (width * channels + 1):
        raise ValueError("it ends too early")
    rows = np.frombuffer(raw, np.uint8).reshape(height, -1)
    pixels = _unfiltered(rows[:, 0], rows[:, 1:].astype(np.int32), channels).reshape(height, width, channels)
    return pixels[..., : channels - 1] if channels in (2, 4) else pixels


def _unfiltered(filters: np.ndarray, rows: np.ndarray, channels: int) -> Pixels:
    """Each row stands as its difference from what is left of it, above it, or a guess from both."""
    result = np.zeros_like(rows)
    above = np.zeros(rows.shape[1] + channels, np.int32)  # with a pixel of nothing in front
    for index, (kind, row) in enumerate(zip(filters.tolist(), rows, strict=True)):
        line = np.concatenate([np.zeros(channels, np.int32), row])
        if kind == 2:
            line[channels:] = (row + above[channels:]) & 255
        elif kind:
            for place in range(channels, len(line)):
                left, up, corner = line[place - channels], above[place], above[place - channels]
                guess = {1: left, 3: (left + up) // 2, 4: _nearest(left, up, corner)}.get(kind)
                if guess is None:
                    raise ValueError(f"filter {kind}")
                line[place] = (line[place] + guess) & 255
        result[index], above = line[channels:], line
    return result.astype(np.uint8)


def _nearest(left: int, up: int, corner: int) -> int:
    """Paeth's guess: of the three neighbours the one nearest to left + up − corner."""
    estimate = left + up - corner
    return min((left, up, corner), key=lambda value: abs(estimate - value))


def write_png(pixels: Pixels) -> bytes:
    """A file of (height, width, 1 or 3)."""
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], 1)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)), chunk(b"IEND", b"")
    return SIGNATURE + b"".join(parts)
