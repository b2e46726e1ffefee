"""numba's compiler, set up before it compiles anything."""

import os
import sys

import llvmlite.binding as llvm

from kl_lens.base.system import ON_X86

# LLVM uses half of each register of AVX-512 unless it is told otherwise. With all of it, the scan of Mamba-1 takes 0.72
# of the time (Cascade Lake). By the environment, so that workers compute the same. The user's own settings win, and
# what numba already has if others use it in this process.
if ON_X86 and not {"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"} & {*os.environ}:
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        more = "" if "numba" in sys.modules else ",-prefer-256-bit"
        os.environ |= {
            "NUMBA_CPU_NAME": llvm.get_host_cpu_name(),
            "NUMBA_CPU_FEATURES": features.flatten() + more,
        }

from numba import get_num_threads, njit, prange

__all__ = ["get_num_threads", "njit", "prange"]
