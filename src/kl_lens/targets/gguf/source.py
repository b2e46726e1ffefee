"""What `kl-lens runtime build` changes in llama.cpp's source before it compiles: how fast and where, not what.

A matrix that moves to other kernels is summed up in another order; nothing else changes a bit of a result.

A release in which a change has nothing to hold on to is built without it: all of a change is made, or nothing of it.
What each is worth is in docs/performance.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

Places = list[tuple[str, str, str]]  # the first `text` behind `behind` becomes `new`

# Bytes: how far ahead weights are asked for, in rows and in tiles, and how many come at once.
_AHEAD, _TILES_AHEAD, _LINE = 4096, 1024, 64
_TOKEN = "if (M == 1)"  # what AMX's products do with a single token stands behind it
_KERNELS = (("quants.c", "void ggml_vec_dot_", "x"), ("repack.cpp", "static void gemv_", "b_ptr"))
_CPU = "ggml/src/ggml-cpu"
_LARGE = 32 << 20  # bytes: buffers from here on are laid in large pages
_PAGE = 2 << 20


def improve(source: Path) -> list[str]:
    """Makes every change that this release can take; the names of those that found no place."""
    changes: dict[str, Callable[[Path], bool]] = {
        "whole tile configurations": mend_tiles,
        "tiles configured anew": configure_tiles_anew,
        "requests ahead": fetch_ahead,
        "tiles for rows in sixteens": tile_sixteens,
        "more tiles at once": read_tiles_ahead,
        "Q8_0 tiles without sums": drop_tile_sums,
        "states in place": keep_states_in_place,
        "large pages": use_large_pages,
    }
    return [name for name, change in changes.items() if not change(source)]


def mend_tiles(source: Path) -> bool:
    """Keeps the whole configuration of AMX's tiles, of which GCC 12 drops rows and columns.

    Its header says that `ldtilecfg` reads 8 bytes, so it takes the stores of the other 56 for dead, and the first
    product of a prompt with quantized weights is an illegal instruction.
    """
    call = "_tile_loadconfig(&tc);"
    return _edit(source, {f"{_CPU}/amx/mmq.cpp": [("", call, f'__asm__ volatile("" : : "m"(tc)); {call}')]})


def configure_tiles_anew(source: Path) -> bool:
    """Before every product, and not once in the life of a thread.

    After OpenVINO has multiplied in the same one, the tiles are not configured any more: an illegal instruction.
    """
    once = ("void ggml_tile_config_init", "if (done) {", "if (false) {")
    return _edit(source, {f"{_CPU}/amx/mmq.cpp": [once]})


def fetch_ahead(source: Path) -> bool:
    """Has the x86 kernels ask for weights before they need them.

    A token reads every weight once, from memory, and a core of a Xeon that waits for its own prefetching gets half of
    what it could read. A loop that does not read blocks by their index stays as it is.
    """
    made = 0
    for name, first, blocks in _KERNELS:
        file = source / _CPU / "arch/x86" / name
        if not file.is_file():
            continue
        before, kernels, after = file.read_text(encoding="utf-8").partition(first)
        loop = rf"(?m)^ +for \((?:\w+ \w+ = 0)?; ?(\w+)(?: \+ 1)? < nb; .*\{{$(?=(?:.*\n){{,40}}.*\b{blocks}\[\1\])"
        ask = (
            rf"\g<0> for (size_t at = 0; at < sizeof({blocks}[0]); at += {_LINE}) "
            rf"__builtin_prefetch((const char *)({blocks} + \1) + {_AHEAD} + at);"
        )
        after, count = re.subn(loop, ask, after)
        file.write_text(before + kernels + after, encoding="utf-8")
        made += count
    return made > 0


def tile_sixteens(source: Path) -> bool:
    """Puts matrices on AMX whose rows are a multiple of 16 and not of 32: Mamba-2's `in_proj`, and many a head.

    A single token goes through kernels that take any number of tiles of 16 rows; in a prompt the last 16 rows, which
    do not fill a pair of tiles, go through the same kernels token by token.
    """
    width = "int nb_size = BLOCK_N;"
    single = "tinygemm_kernel_vnni<vec_dot_type, type, float, 1, TILE_N, blck_size>::apply"
    rest = (
        f"{width} if (N - nb_start < BLOCK_N) {{ for (int row = mb_start; row < mb_start + mb_size; ++row) {{ "
        f"{single}(KB, wdata_batch + row * row_size_A, "
        "(const char *) src0->data + src0_offset + PACKED_INDEX(nb * 2, 0, KB, TILE_SIZE), "
        "(float *) dst->data + dst_offset + row * N + nb_start, ldc); } continue; }"
    )
    return _edit(
        source,
        {
            f"{_CPU}/amx/amx.cpp": [("", "op->ne[0] % (TILE_N * 2)", "op->ne[0] % TILE_N")],
            f"{_CPU}/amx/mmq.cpp": [
                (_TOKEN, "switch (nb_size) {", "switch (nb_size) {" + _cases(16, 48)),
                (_TOKEN, width, rest),
            ],
        },
    )


def read_tiles_ahead(source: Path) -> bool:
    """Has the kernels that multiply tiles with one token read eight columns of them at once, and ask for them before.

    A core reads faster from eight places of memory than from four.
    """
    tile = "const char * b_ptr = B + PACKED_INDEX(col, i, KB, TILE_SIZE);"
    tiles, first = "constexpr int kTilesN = 4;", "switch (nb_size) {"
    width = "constexpr int BLOCK_N = TILE_N * kTilesN;"
    ask = f" for (int at = 0; at < TILE_SIZE; at += {_LINE}) {{ __builtin_prefetch(b_ptr + {_TILES_AHEAD} + at); }}"
    file = source / _CPU / "amx/mmq.cpp"
    if not _edit(
        source,
        {
            f"{_CPU}/amx/mmq.cpp": [
                # Four where eight would leave threads without work.
                (_TOKEN, tiles, "const int kTilesN = N >= TILE_N * 8 * 4 * params->nth ? 8 : 4;"),
                (_TOKEN, width, width.replace("constexpr", "const")),
                (_TOKEN, first, first + _cases(80, 112)),
                *((_TOKEN, f"case {every}:", f"case {every}:") for every in (96, 128)),
                ("struct tinygemm_kernel_vnni", tile, tile),
            ]
        },
    ):
        return False
    file.write_text(file.read_text(encoding="utf-8").replace(tile, tile + ask), encoding="utf-8")
    return True


def _cases(*widths: int) -> str:
    return "".join(f" case {width}: LAUNCH_TINYGEMM_KERNEL_VNNI({width}); break;" for width in widths)


def drop_tile_sums(source: Path) -> bool:
    """Lays Q8_0 out for AMX in as many bytes as the file has: four of 38 were sums of weights.

    Its instruction multiplies unsigned with signed bytes. llama.cpp shifts the activations and takes 128 × the sum of
    the weights away again, stored with every block; here the weights are shifted as they are read, and what is taken
    away is 128 × the sum of the activations, one for all rows. They are whole numbers: the result is the same.
    """
    kernel = "struct tinygemm_kernel_vnni<block_q8_0, block_q8_0,"
    shifted = "_mm512_xor_si512(off, _mm512_loadu_si512((const __m512i *)(b_ptr + k * 64)));"
    each = "for (int k = 0; k < 8; ++k) {"
    stored = "const __m512i vcomp = _mm512_loadu_si512((const __m512i *)(b_ptr + offset2));"
    return _edit(
        source,
        {
            f"{_CPU}/amx/mmq.cpp": [
                ("struct do_compensate", "std::is_same<T, block_q8_0>::value", "false"),
                ("void pack_B(void * RESTRICT packed_B, const block_q8_0 *", "s8s8_compensation(packed_B);", ""),
                (kernel, " + TILE_N * sizeof(int32_t);", ";"),
                (kernel, "__m512i vb[8];", "__m512i vb[8]; __m512i vcomp;"),
                (kernel, each, f"vcomp = _mm512_setzero_si512(); {each}"),
                (kernel, "va[k] = _mm512_add_epi8(va[k], off);", "vcomp = _mm512_dpbusd_epi32(vcomp, off, va[k]);"),
                (kernel, "_mm512_loadu_si512((const __m512i *)(b_ptr + k * 64));", shifted),
                (kernel, stored, ""),
                (kernel, "_mm512_dpbusd_epi32(vsum, va[k], vb[k])", "_mm512_dpbusd_epi32(vsum, vb[k], va[k])"),
            ]
        },
    )  # fmt: skip


def keep_states_in_place(source: Path) -> bool:
    """Has the scan of one sequence write its states where they are kept, instead of into a copy that is copied back.

    Only where nothing runs between the two, and two things use what the scan gives: that copying and, in all models of
    llama.cpp, its outputs. Each element is read before it
    is written, so it may be the place that the old one came from. Operations that a callback watches run one by one,
    and copy as before.
    """
    fuse = "struct ggml_tensor * node = cgraph->nodes[node_n];"
    return _edit(
        source,
        {
            f"{_CPU}/ggml-cpu-impl.h": [
                ("struct ggml_compute_params {", "bool use_ref;", "bool use_ref; void * states;"),
            ],
            f"{_CPU}/ops.cpp": [
                ("ggml_compute_forward_ssm_scan_f32(", "for (int i2 = 0; i2 < nt; ++i2) {",
                 "if (params->states) { s = (float *) params->states; }\n        for (int i2 = 0; i2 < nt; ++i2) {"),
            ],
            f"{_CPU}/ggml-cpu.c": [
                ("int ggml_cpu_try_fuse_ops(", fuse, fuse + _FUSION),
            ],
        },
    )  # fmt: skip


_FUSION = """
    if (node->op == GGML_OP_SSM_SCAN && ggml_get_op_params_i32(node, 0) == 1 && ggml_nelements(node->src[6]) == 1 &&
        ggml_node_has_n_uses(cgraph, node_n, 2)) {
        const int64_t outputs = ggml_nelements(node->src[1]);
        for (int next = node_n + 1; next < cgraph->n_nodes; ++next) {
            const struct ggml_tensor * copy = cgraph->nodes[next];
            if (ggml_op_is_empty(copy->op) || ggml_is_empty(copy)) {
                continue;
            }
            const struct ggml_tensor * states = copy->src[0];
            if (copy->op == GGML_OP_CPY && (copy->flags & GGML_TENSOR_FLAG_COMPUTE) &&
                states->view_src == node && states->type == GGML_TYPE_F32 &&
                states->view_offs == outputs * sizeof(float) && ggml_is_contiguous(states) &&
                copy->type == GGML_TYPE_F32 && ggml_is_contiguous(copy) &&
                ggml_nelements(copy) == ggml_nelements(node) - outputs) {
                struct ggml_compute_params scan = *params;
                scan.states = copy->data;
                ggml_compute_forward(&scan, node);
                return next - node_n;
            }
            return 0;
        }
    }
"""


def use_large_pages(source: Path) -> bool:
    """Asks Linux to lay large buffers in pages of 2 MB, of which it looks up one where it would look up 512."""
    call = "int result = posix_memalign(&aligned_memory, alignment, size);"
    large = (
        f"const bool large = size >= {_LARGE}; "
        f"int result = posix_memalign(&aligned_memory, large ? {_PAGE} : alignment, size);\n"
        "  #ifdef MADV_HUGEPAGE\n"
        "    if (large && result == 0) { madvise(aligned_memory, size, MADV_HUGEPAGE); }\n"
        "  #endif"
    )
    start = "void * ggml_aligned_malloc(size_t size) {"
    include = f"#if defined(__linux__)\n#include <sys/mman.h>\n#endif\n{start}"
    return _edit(source, {"ggml/src/ggml.c": [(start, call, large), ("", start, include)]})


def _edit(source: Path, places: dict[str, Places]) -> bool:
    """Makes all of a change, if every file is there and every text in it."""
    texts = {}
    for name, edits in places.items():
        if not (source / name).is_file():
            return False
        text = (source / name).read_text(encoding="utf-8")
        for behind, old, new in edits:
            start = text.find(behind)
            at = text.find(old, start)
            if start < 0 or at < 0:
                return False
            text = text[:at] + new + text[at + len(old) :]
        texts[source / name] = text
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
    return True
