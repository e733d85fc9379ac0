"""How a model comes to a CUDA device, and what its bits depend on there. Knows names, versions."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from chatkv.attention.triton_check import Shape, problem
from chatkv.attention.triton_tree import LARGEST_HEAD, TritonBackend
from chatkv.errors import BackendUnavailable, ModelError
from chatkv.kv.format import KVFormat
from chatkv.models import chunks, dense, random_model, weights
from chatkv.models.catalog import ModelFile
from chatkv.models.cuda_layers import PAGE_SIZE
from chatkv.models.dense import DenseWeights
from chatkv.models.folder import ModelFolder
from chatkv.models.spec import ModelSpec
from chatkv.tokenizer import Tokenizer

HEAD_UNIT = 32
"""Half of it is the fewest columns of a product that rotates."""
FP8_OLDEST = (8, 9)
"""Compute capability that converts float8_e4m3fn."""
CHECKED_WINDOW = 500
"""Positions of the window that is checked at load, of a model that has any."""
VERSION = 1
"""Of our own kernels' arithmetic."""
Progress = Callable[[str, int, int], None]


def load_weights(
    file: ModelFile, device: torch.device, dtype: torch.dtype, progress: Progress | None = None
) -> tuple[DenseWeights, Tokenizer]:
    """A model's weights on the device, and its tokenizer.

    Raises:
        UnknownModel: No random model of that name.
        BadWeights: The files cannot be used; says why.
        BackendUnavailable: The kernels do not serve a model of this shape.
        ModelError: The device has no room; says how much is missing.
    """
    try:
        if file.kind == "random":
            expect_shape(random_model.random_spec(file.name)[0])
            made = random_model.random_weights(file.name, device, dtype)
            return made, random_model.tokenizer_of(file.name)
        if file.kind == "folder":
            opened = ModelFolder(file.path)
            expect_shape(opened.spec)
            return opened.load(device, dtype, progress), opened.tokenizer()
        packed = weights.load(file, progress)
        expect_shape(packed.spec)
        tokenizer = Tokenizer.from_file(packed.folder / "tokenizer.json")
        return dense.from_packed(packed, device, dtype, progress), tokenizer
    except torch.OutOfMemoryError as error:
        # It was there when it was looked for: another program took it since.
        free = torch.cuda.mem_get_info(device)[0] / dense.GIB
        raise ModelError(
            f"{file.name} did not fit {device} while it was loaded: {free:.1f} GiB are free.",
            hint="Close what else uses the device, or choose --device cpu.",
        ) from error


def read_spec(file: ModelFile) -> tuple[ModelSpec, Tokenizer]:
    """What a model is, and its tokenizer, without its weights.

    Raises:
        UnknownModel, BadWeights: As `load_weights`.
    """
    if file.kind == "random":
        return random_model.random_spec(file.name)[0], random_model.tokenizer_of(file.name)
    if file.kind == "folder":
        opened = ModelFolder(file.path)
        return opened.spec, opened.tokenizer()
    packed = weights.load(file, None)
    return packed.spec, Tokenizer.from_file(packed.folder / "tokenizer.json")


def expect_shape(spec: ModelSpec) -> None:
    """Raise unless the kernels serve a model of this shape.

    Raises:
        BackendUnavailable: They do not, with the numbers.
    """
    if spec.head_dim % HEAD_UNIT or spec.head_dim > LARGEST_HEAD:
        raise BackendUnavailable(
            f"{spec.name} has heads of size {spec.head_dim}; on a CUDA device the size is a "
            f"multiple of {HEAD_UNIT} up to {LARGEST_HEAD}.",
            hint="Choose --device cpu, or another model.",
        )


def expect_format(kv: KVFormat, spec: ModelSpec, device: torch.device) -> None:
    """Raise unless the kernels serve a model with such pages on the device.

    Raises:
        BackendUnavailable: They do not, with the numbers.
    """
    dim = spec.head_dim
    if kv.name == "int4" and (dim < 64 or dim & (dim - 1)):
        raise BackendUnavailable(
            f"int4 K/V pages need heads of 64, 128 or 256 channels; {spec.name} has {dim}.",
            hint="Use --kv-dtype int8.",
        )
    if kv.name == "fp8" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < FP8_OLDEST:
            raise BackendUnavailable(
                f"fp8 K/V pages need compute capability 8.9; {device} has "
                f"{capability[0]}.{capability[1]}.",
                hint="Use --kv-dtype int8, which is as small.",
            )


def expect_exact_attention(
    backend: TritonBackend,
    spec: ModelSpec,
    model: DenseWeights,
    page_dtype: torch.dtype | None = None,
) -> None:
    """Run random trees of the model's shape through the backend, on a device.

    Args:
        page_dtype: Of quantised pages; None is the model's own.

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
        page_dtype=page_dtype,
        device=str(model.device),
    )
    # One kernel serves windows of any size.
    windows = {None if window is None else CHECKED_WINDOW for window in spec.windows} or {None}
    found = next(filter(None, (problem(backend, shape, window) for window in windows)), None)
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
