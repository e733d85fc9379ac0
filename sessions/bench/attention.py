"""Attention by our backends and by others: time, rates and memory, of what is proved right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from chatkv.attention.triton_check import TOLERANCES
from chatkv.errors import BackendUnavailable, ChatKVError, UsageError
from sessions.bench.about import about
from sessions.bench.measure import Memory, Peak, Work, free_bytes, interleaved, work_of
from sessions.bench.request import FREE_SHARE, GIB, Request, device_of, shapes_of
from sessions.bench.shapes import DTYPES, Data, Expected, Shape
from sessions.bench.ways import WAYS, Way


@dataclass(frozen=True, slots=True)
class Row:
    """One backend on one shape. Times are of one call, over the turns."""

    kind: str
    num_seqs: int
    rows: int
    kv_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    backend: str
    kernel: str
    error: float
    """Largest relative error of a row against the reference."""
    wrong: bool
    """The error is above the tolerance of the dtype; nothing was timed."""
    ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    tflop_per_s: float | None = None
    gb_per_s: float | None = None
    allocated_mib: float | None = None
    reserved_mib: float | None = None
    rss_mib: float | None = None
    captured: bool = False
    """Timed as a CUDA graph."""
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Missing:
    """A row that is not there, and why. `kv_len` and `rows` are None if it is nowhere."""

    backend: str
    reason: str
    kv_len: int | None = None
    rows: int | None = None


@dataclass(slots=True)
class Report:
    """What was measured, and on what."""

    about: dict[str, Any]
    rows: list[Row] = field(default_factory=list[Row])
    missing: list[Missing] = field(default_factory=list[Missing])

    @property
    def num_wrong(self) -> int:
        """Rows that differ from the reference."""
        return sum(row.wrong for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """For `--json` and the raw results."""
        return {
            "bench": "attention",
            "about": self.about,
            "rows": [asdict(row) for row in self.rows],
            "missing": [asdict(gap) for gap in self.missing],
        }


def measure(request: Request, progress: Callable[[str], None] = lambda text: None) -> Report:
    """Measure all shapes of a request.

    Raises:
        UsageError: A number makes no sense, or the tensors do not fit the memory.
        BackendUnavailable: The device or a named backend cannot be used; says why.
    """
    device = device_of(request.device)
    shapes = shapes_of(request, device)
    report = Report(about(device, dtype=request.dtype))
    ways = _ways(request, shapes, report)
    for shape in shapes:
        progress(f"{shape.title}, kv_len {shape.kv_len:,}")
        try:
            _measure(shape, ways, request, report)
        except torch.OutOfMemoryError as error:
            free = free_bytes(device) / GIB
            raise UsageError(
                f"{shape.title}, kv_len {shape.kv_len:,} does not fit: {free:,.1f} GiB are free on "
                f"{device} besides.",
                hint="Use fewer --seqs or a shorter --kv-len, or end what else runs there.",
            ) from error
        if shape.is_cuda:
            torch.cuda.empty_cache()
    return report


def _ways(request: Request, shapes: Sequence[Shape], report: Report) -> list[Way]:
    """The backends to run. One that is named can run all shapes, or the request is refused."""
    if "reference" in request.backends:
        raise UsageError(
            "The reference is what every row is compared with; it is not timed.",
            hint=f"Backends: {', '.join(WAYS)}.",
        )
    for name in request.backends:
        if name not in WAYS:
            raise UsageError(
                f"There is no attention backend {name!r}.", hint=f"Backends: {', '.join(WAYS)}."
            )
        for shape in shapes:
            if reason := WAYS[name].absent(shape) or _too_large(WAYS[name], shape):
                raise _unavailable(name, shape, reason)
    if request.backends:
        return [WAYS[name] for name in dict.fromkeys(request.backends)]
    found: list[Way] = []
    for way in WAYS.values():
        if reason := way.absent(shapes[0]) or way.only_named():
            report.missing.append(Missing(way.name, reason))
        else:
            found.append(way)
    return found


def _unavailable(name: str, shape: Shape, reason: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"Backend {name} cannot run {shape.title}, kv_len {shape.kv_len:,}: {reason}.",
        hint="Leave it out of --backend, or change the shape.",
    )


def _too_large(way: Way, shape: Shape) -> str:
    needed, free = way.scratch_bytes(shape), free_bytes(shape.device) - shape.data_bytes
    if needed <= FREE_SHARE * free:
        return ""
    return f"its scores need {needed / GIB:,.1f} GiB, and {max(0, free) / GIB:,.1f} GiB are free"


@dataclass(frozen=True, slots=True)
class _Ready:
    """A way that gave the right result."""

    row: dict[str, Any]
    work: Work
    memory: Memory


def _measure(shape: Shape, ways: Sequence[Way], request: Request, report: Report) -> None:
    data = [Data(shape, seed) for seed in range(shape.copies)]
    if any(way.is_peer for way in ways):
        for copy in data:
            _ = copy.contiguous  # not what a peer's memory is
    expected = Expected(data[0])
    ready: dict[str, Row | _Ready] = {}
    for way in ways:
        reason = _too_large(way, shape)
        try:
            found = None if reason else _prepare(way, data, expected)
        except torch.OutOfMemoryError:
            free = free_bytes(shape.device) / GIB
            found, reason = None, f"out of memory with {free:,.1f} GiB free"
        except ChatKVError as error:
            found, reason = None, error.message.removesuffix(".")
        except Exception as error:
            if not way.is_peer:
                raise
            text = str(error).strip().splitlines() or [""]
            found, reason = None, f"{type(error).__name__}: {text[0].removesuffix('.')}"
        if found is not None:
            ready[way.name] = found
        elif request.backends:
            raise _unavailable(way.name, shape, reason)
        else:
            report.missing.append(Missing(way.name, reason, shape.kv_len, shape.rows))
    works = {name: found.work for name, found in ready.items() if isinstance(found, _Ready)}
    timings = interleaved(works, request.turns, shape.device)
    for name, found in ready.items():
        if isinstance(found, Row):
            report.rows.append(found)
            continue
        timing = timings[name]
        report.rows.append(
            Row(
                **found.row,
                wrong=False,
                ms=timing.median,
                p10_ms=timing.p10,
                p90_ms=timing.p90,
                tflop_per_s=shape.flops / timing.median / 1e9,
                gb_per_s=shape.needed_bytes / timing.median / 1e6,
                **asdict(found.memory),
                captured=found.work.captured is not None,
                copies=shape.copies,
            )
        )


def _prepare(way: Way, data: Sequence[Data], expected: Expected) -> Row | _Ready:
    """Compare with the reference, then measure memory, then capture. A row if it is wrong."""
    shape = data[0].shape
    limit = TOLERANCES[DTYPES[shape.dtype]]
    built = way.build(data[:1])
    error = expected.error(built.unpack(built.runs[0]()))
    facts: dict[str, Any] = {
        "kind": shape.kind,
        "num_seqs": shape.num_seqs,
        "rows": shape.rows,
        "kv_len": shape.kv_len,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "dtype": shape.dtype,
        "backend": way.name,
        "kernel": built.kernel(),
        "error": error,
    }
    # Written so that NaN fails.
    if not error <= limit:
        return Row(**facts, wrong=True)
    del built  # with what only a first run needs
    peak = Peak(shape.device)
    built = way.build(data[:1])
    memory = peak.over(built.runs[0])
    built = way.build(data)
    work = work_of(built.runs, shape.device)
    if work.captured is not None:
        work.captured.zero_()
        work.run()
        facts["error"] = expected.error(built.unpack(work.captured))
        if not facts["error"] <= limit:
            return Row(**facts, wrong=True)
    return _Ready(facts, work, memory)
