"""Which device serves a model, and why another cannot. Knows devices and loaders, no weights."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from chatkv.errors import BackendUnavailable, ChatKVError
from chatkv.models.catalog import ModelFile
from chatkv.models.model import Model
from chatkv.models.random_model import tokenizer_of
from chatkv.models.random_packed import random_packed

OLDEST = (8, 0)
"""Compute capability: bfloat16 matrix units and asynchronous copies."""
Progress = Callable[[str, int, int], None]


def load_model(
    file: ModelFile,
    device: str = "auto",
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> tuple[Model, str]:
    """Load a model where it should run.

    Args:
        file: What `catalog.find` found.
        device: `cpu`, `cuda`, `cuda:1`, `npu`, or `auto`: a CUDA device if one can be used, else
            the CPU. A named device is never replaced by another.
        threads: CPU threads; None is every core this process may use.
        progress: Called with (what, done, total).

    Returns:
        The model, and one sentence the user should see: why `auto` left a CUDA device that is here
        unused. Empty as a rule.

    Raises:
        BackendUnavailable: The device is not here, or cannot run this.
        ModelError: The model cannot be loaded, or does not fit the device.
    """
    expect_no_npu(device)
    if device.startswith("cuda"):
        return _load_cuda(file, device, progress), ""
    notice = ""
    if device == "auto" and torch.cuda.is_available():
        try:
            return _load_cuda(file, "cuda", progress), ""
        except ChatKVError as error:
            notice = f"The CPU is used, not the CUDA device: {error.message}"
            torch.cuda.empty_cache()
    return _load_cpu(file, threads, progress, notice), notice


def load_free(file: ModelFile, device: str) -> Model | None:
    """The model with matrix products of the library in its steps: a row's bits may depend on the
    rows beside it. For measuring what exactness costs; None where all kernels are our own.

    Raises:
        ModelError: It cannot be loaded, or does not fit the device.
    """
    if not device.startswith("cuda"):
        return None
    from chatkv.models.cuda_decoder import CudaDecoder

    return CudaDecoder.load(file, expect_cuda(device), linear="library")


def expect_no_npu(device: str) -> None:
    """Raise BackendUnavailable for an Ascend NPU: no backend of ours has run on one."""
    if device.startswith("npu"):
        raise BackendUnavailable(
            "This version runs on cpu and cuda; an Ascend NPU is not served yet.",
            hint="Choose --device cpu.",
        )


def expect_cuda(device: str = "cuda") -> torch.device:
    """The CUDA device of that name, fit for our kernels.

    Raises:
        BackendUnavailable: There is none, it is too old, or Triton is missing.
    """
    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = f"was built for CUDA {built} but finds no device" if built else "has no CUDA"
        raise BackendUnavailable(
            f"No CUDA device can be used: torch {torch.__version__} {reason}.",
            hint="Check the driver with nvidia-smi, or choose --device cpu.",
        )
    place = torch.device(device)
    if place.index is not None and place.index >= torch.cuda.device_count():
        raise BackendUnavailable(
            f"There is no {device}: {torch.cuda.device_count()} CUDA devices are here.",
            hint="Use --device cuda.",
        )
    capability = torch.cuda.get_device_capability(place)
    if capability < OLDEST:
        raise BackendUnavailable(
            f"{torch.cuda.get_device_name(place)} has compute capability "
            f"{capability[0]}.{capability[1]}; {OLDEST[0]}.{OLDEST[1]} is needed.",
            hint="Choose --device cpu.",
        )
    if find_spec("triton") is None:
        raise BackendUnavailable(
            "A CUDA device is here, but the package triton is not installed.",
            hint="pip install 'chatkv[gpu]', or choose --device cpu.",
        )
    return place


def _load_cuda(file: ModelFile, device: str, progress: Progress | None) -> Model:
    place = expect_cuda(device)
    from chatkv.models.cuda_decoder import CudaDecoder

    return CudaDecoder.load(file, place, progress=progress)


def _load_cpu(
    file: ModelFile, threads: int | None, progress: Progress | None, notice: str
) -> Model:
    from chatkv.models.decoder import Decoder

    if file.kind == "random" and (packed := random_packed(file.name)) is not None:
        return Decoder(packed, tokenizer_of(file.name), threads=threads)
    if file.kind != "gguf":
        what = "Random weights run" if file.kind == "random" else "A folder of safetensors runs"
        raise BackendUnavailable(
            notice or f"{what} on a CUDA device, and none can be used here.",
            hint="The CPU runs .gguf models.",
        )
    return Decoder.load(file, threads=threads, progress=progress)
