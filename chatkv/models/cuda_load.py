"""How a model comes to a CUDA device, and what its bits depend on there. Knows names, versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import triton

from chatkv.attention.triton_check import Shape, problem
from chatkv.attention.triton_tree import TritonBackend
from chatkv.errors import BackendUnavailable
from chatkv.models import catalog, chunks, dense, random_model, weights
from chatkv.models.cuda_layers import PAGE_SIZE
from chatkv.models.dense import DenseWeights
from chatkv.models.folder import ModelFolder
from chatkv.models.spec import ModelSpec
from chatkv.tokenizer import Tokenizer

OLDEST = (8, 0)
"""Compute capability: bfloat16 matrix units and asynchronous copies."""
VERSION = 1
"""Of our own kernels' arithmetic."""
Progress = Callable[[str, int, int], None]


def load_weights(
    name: str, device: torch.device, dtype: torch.dtype, progress: Progress | None = None
) -> tuple[DenseWeights, Tokenizer]:
    """A model's weights on the device, and its tokenizer.

    Args:
        name: A catalogue name, a .gguf, a folder with safetensors, or `random:tiny` and such.

    Raises:
        UnknownModel: Nothing of that name.
        BadWeights: The files cannot be used; says why.
        ModelError: The device has no room; says how much is missing.
    """
    if random_model.is_random(name):
        made = random_model.random_weights(name, device, dtype)
        return made, random_model.byte_tokenizer()
    if (folder := Path(name).expanduser()).is_dir():
        opened = ModelFolder(folder)
        return opened.load(device, dtype, progress), opened.tokenizer()
    packed = weights.load(catalog.find(name), progress)
    tokenizer = Tokenizer.from_file(packed.folder / "tokenizer.json")
    return dense.from_packed(packed, device, dtype, progress), tokenizer


def expect_exact_attention(backend: TritonBackend, spec: ModelSpec, model: DenseWeights) -> None:
    """Run random trees of the model's shape through the backend, on a device.

    Raises:
        BackendUnavailable: Attention is wrong here, or a tree's bits are not plain decoding's.
    """
    if model.device.type != "cuda":
        return
    shape = Shape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=PAGE_SIZE,
        dtype=model.dtype,
        device=str(model.device),
    )
    found = problem(backend, shape)
    if found is not None:
        raise BackendUnavailable(
            f"Backend {backend.name} fails its check on {model.device}: {found}.",
            hint="Report the device and driver; --device cpu runs.",
        )


def numerics_of(model: DenseWeights, linear: str) -> str:
    """Names the bits of everything but attention over pages."""
    where = "interpreter"
    if model.device.type == "cuda":
        where = torch.cuda.get_device_name(model.device).replace(" ", "-").lower()
    libraries = f"torch-{torch.__version__}-triton-{triton.__version__}"
    return f"{linear}-{VERSION}/{libraries}-{where}/{chunks.NUMERICS}"


def expect_device(device: str) -> torch.device:
    """The device of that name, fit for our kernels.

    Raises:
        BackendUnavailable: There is none, or it is too old.
    """
    if not torch.cuda.is_available():
        built = torch.version.cuda or "none"
        raise BackendUnavailable(
            f"No CUDA device can be used: torch {torch.__version__} was built for CUDA {built}.",
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
    # Sums rounded to bfloat16 between pieces would depend on how a library cut them.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_tf32 = False
    return place
