"""How chatkv compiles its CPU kernels: one `njit`, one cache folder, one OpenMP runtime.

Knows numba, and where torch keeps its libgomp; knows no attention. numba compiles a cached function
anew when its own file changes, not when a helper in another file does: helpers stay in the file of
their kernel, or in one of `SHARED`.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import numba
import numba.core.config
import numba.extending
import platformdirs
from numba import prange
from numba.core import types
from numba.core.codegen import get_host_cpu_features

__all__ = [
    "bits_to_float32",
    "float32_to_bits",
    "fma",
    "intrinsic",
    "njit",
    "prange",
    "set_threads",
]

SHARED = (
    "attention/jit.py",
    "attention/simd.py",
    "attention/simd_codes.py",
    "attention/simd_hadamard.py",
    "attention/cpu_kernels.py",
    "attention/cpu_math.py",
    "models/lanes.py",
    "models/row_lanes.py",
    "models/layers.py",
    "models/linear.py",
    "models/packing.py",
    "sampling_cpu.py",
)

# Any: their stubs describe the functions that make code, not the functions that are made.
intrinsic: Any = numba.extending.intrinsic
_config: Any = numba.core.config


def _share_openmp() -> str:
    """Load torch's libgomp for everyone, so that numba's threads are torch's threads.

    Two OpenMP runtimes in one process would each keep a spinning team on the same cores.

    Returns:
        The threading layer to ask numba for: `omp`, or `default` without OpenMP on the machine.
    """
    spec = importlib.util.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or []:
        for library in sorted(Path(folder, "lib").glob("libgomp*.so*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return "default"
    return "omp"


def _cache_folder() -> str:
    """Where machine code is kept: a new folder when a shared helper changes."""
    digest = hashlib.blake2b(digest_size=6)
    for name in SHARED:
        digest.update((Path(__file__).parent.parent / name).read_bytes())
    folder = os.environ.get("NUMBA_CACHE_DIR")
    root = Path(folder) if folder else Path(platformdirs.user_cache_dir("chatkv"), "numba")
    return str(root / digest.hexdigest())


def _features() -> str | None:
    """This processor's features for LLVM, or None to leave them to numba.

    Of one `vpdpwssd` LLVM makes two or three instructions on Intel's older processors, as if it
    were slow. It is what the linear layers are made of, and takes less.
    """
    known = get_host_cpu_features()
    return f"{known},+fast-dpwssd" if "+avx512vnni" in known.split(",") else None


_config.CACHE_DIR = _cache_folder()
if _config.CPU_FEATURES is None:
    _config.CPU_FEATURES = _features()
if not os.environ.get("NUMBA_THREADING_LAYER"):
    _config.THREADING_LAYER = _share_openmp()


def njit(*signatures: Any, **options: Any) -> Any:
    """`numba.njit` with the settings every kernel here shares; `options` override them.

    No fastmath: a sum is added in the order that is written, so bits do not depend on vector width.
    Decorate each function once: the cache takes two variants of one function for the same.
    """
    settings = {"cache": True, "nogil": True, "error_model": "numpy", "boundscheck": False}
    return numba.njit(*signatures, **(settings | options))


def set_threads(count: int) -> None:
    """Use `count` threads in numba kernels and in torch. Call once, before the first kernel."""
    import torch

    count = max(1, count)
    numba.set_num_threads(min(count, _config.NUMBA_NUM_THREADS))
    torch.set_num_threads(count)  # last: starting numba's threads sets torch's to all cores


@intrinsic
def fma(_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32 with one rounding, however the loop around it is vectorised."""
    signature = types.float32(types.float32, types.float32, types.float32)

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return signature, codegen


@intrinsic
def bits_to_float32(_context: Any, bits: Any) -> Any:
    """The float32 with these 32 bits (int32)."""
    return _bitcast(types.float32, types.int32)


@intrinsic
def float32_to_bits(_context: Any, value: Any) -> Any:
    """The 32 bits (int32) of a float32."""
    return _bitcast(types.int32, types.float32)


def _bitcast(result: Any, argument: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return result(argument), codegen
