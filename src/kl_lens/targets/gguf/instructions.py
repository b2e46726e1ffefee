"""Which instructions the processor has and which a build of llama.cpp uses. Most of its speed depends on this."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
# llama.cpp's name → the kernel's, for the instructions that its quantized products use.
_WORDS = {
    "AVX": "avx", "AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "AVX512": "avx512f",
    "AVX512_VBMI": "avx512vbmi", "AVX512_VNNI": "avx512_vnni", "AVX512_BF16": "avx512_bf16", "AMX_INT8": "amx_int8",
    "NEON": "asimd", "FP16_VA": "asimdhp", "DOTPROD": "asimddp", "MATMUL_INT8": "i8mm", "SVE": "sve",
}  # fmt: skip


@cache
def processor_instructions() -> frozenset[str]:
    """In llama.cpp's names; empty if the system does not list them."""
    try:
        text = CPU_INFO.read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = set(line.group(1).split()) if line else set()
    return frozenset(word for word, flag in _WORDS.items() if flag in flags)


def used_instructions(system_info: str) -> frozenset[str]:
    """Parses `llama_print_system_info`: `CUDA : ARCHS = 900 | CPU : AVX2 = 1 | F16C = 1 | …`."""
    processor = system_info.partition("CPU :")[2] or system_info
    return frozenset(word for word, value in re.findall(r"(\w+) = (\d+)", processor) if int(value))


def unused_instructions(system_info: str) -> tuple[str, ...]:
    """Instructions that the processor has and this build does not use, in the order of `_WORDS`."""
    unused = processor_instructions() - used_instructions(system_info)
    return tuple(word for word in _WORDS if word in unused)
