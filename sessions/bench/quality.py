"""What is lost when keys and values are stored in fewer bits: perplexity, KL, top-1, needles.

Every format reads the same ids in the same ragged steps, several texts at once, beside a plain pool
of its own; then the first ids again alone, which must give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chatkv.batch import chain_batch, chains_batch
from chatkv.errors import BackendUnavailable, UsageError
from chatkv.forget import Limits
from chatkv.kv.format import NAMES, KVFormat
from chatkv.kv.table import PageTable
from chatkv.models.catalog import ModelFile
from chatkv.models.devices import load_model
from chatkv.models.model import Model
from sessions.bench.about import about
from sessions.bench.quality_forget import PolicyRow, measure_policy, policies
from sessions.bench.quality_texts import Needles, chats, needles

Logits = npt.NDArray[np.float32]
KL_BARS = {"int8": 1e-3, "fp8": 1e-3, "int4": 1e-2}
"""Mean KL to the plain pool, in nats a token; a format above it is experimental for the model."""
ROOM = 64
"""Tokens of the context that are left to questions."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is read."""

    formats: tuple[str, ...] = NAMES
    keep_layers: tuple[int, ...] = ()
    texts: tuple[Path, ...] = ()
    """UTF-8 files; none lets the model write three chats."""
    tokens: int = 4096
    """Of each text."""
    needle_lengths: tuple[int, ...] = (512, 2048, 8192)
    needles: int = 20
    """Facts in each of those."""
    device: str = "auto"
    threads: int | None = None


@dataclass(slots=True)
class Row:
    """One format."""

    kv: str
    token_bytes: int
    tokens_per_byte: float
    """Against the plain pool."""
    perplexity: float = math.nan
    kl: float = 0.0
    """Mean over all tokens, of the plain pool's distribution to this one, in nats."""
    top1: float = 1.0
    """Share of tokens whose likeliest one is that of the plain pool."""
    needles: dict[str, float] = field(default_factory=dict[str, float])
    """Share of facts recalled, by tokens of the text."""
    differing: int = 0
    """Rows that have other bits alone than in ragged company."""
    experimental: bool = False


@dataclass(slots=True)
class Report:
    """What was measured, and on what."""

    about: dict[str, Any]
    texts: list[str]
    tokens: int
    """Scored with each format."""
    needles: int
    rows: list[Row] = field(default_factory=list[Row])
    policies: list[PolicyRow] = field(default_factory=list[PolicyRow])
    """With plain pages, in chats that the model wrote; a policy that never acted is left out."""
    missing: dict[str, str] = field(default_factory=dict[str, str])
    """Formats that this device lacks, and why."""

    @property
    def differing(self) -> int:
        """Of all formats."""
        return sum(row.differing for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """For `--json` and the raw results."""
        return {"bench": "quality", **asdict(self)}


class Reader:
    """Texts on pages of one format."""

    def __init__(self, model: Model, kv: KVFormat, tokens: int) -> None:
        self.model, self.pool = model, model.new_pool(tokens, kv)

    def tables(self, count: int) -> list[PageTable]:
        return [PageTable(self.pool) for _ in range(count)]

    def read(self, tables: Sequence[PageTable], parts: Sequence[Sequence[int]]) -> Logits:
        """Put ids behind each table in one step; [rows, V] logits of all of them."""
        with ExitStack() as stack:
            rows = [
                stack.enter_context(table.reserve(len(part)))
                for table, part in zip(tables, parts, strict=True)
            ]
            batch = chains_batch(tables, parts, [reserved.slots for reserved in rows])
            result = self.model.step(batch, self.pool)
            logits = np.stack([result.row(row) for row in range(len(result))])
            for reserved, part in zip(rows, parts, strict=True):
                reserved.keep(range(len(part)))
        return logits

    def store(self, table: PageTable, ids: Sequence[int]) -> None:
        """Put ids behind a table; no logits."""
        step = self.model.max_step_rows
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            with table.reserve(len(part)) as reserved:
                self.model.step(
                    chain_batch(table, part, reserved.slots, want_logits=False), self.pool
                )
                reserved.keep(range(len(part)))

    def recall(self, text: Needles) -> float:
        """Share of the facts whose every token is the likeliest one when it is asked for."""
        table = PageTable(self.pool)
        self.store(table, text.ids)
        found = 0
        for question, answer in text.asked:
            fork = table.fork()
            logits = self.read([fork], [[*question, *answer[:-1]]])
            guesses = logits[len(question) - 1 :].argmax(-1)
            found += guesses.tolist() == list(answer)
            fork.release()
        table.release()
        return found / len(text.asked)


def measure(
    file: ModelFile, request: Request, progress: Callable[[str], None] = lambda text: None
) -> Report:
    """Read the texts with each format.

    Raises:
        UsageError: A text cannot be read, or is too short.
        ModelError: The model cannot be loaded.
        BackendUnavailable: The device is not here.
    """
    model, notice = load_model(file, request.device, threads=request.threads)
    if notice:
        progress(notice)
    limit = model.spec.context_limit - ROOM
    count = min(request.tokens, limit)
    turns: list[list[int]] = []
    if request.texts:
        texts = [_read_text(model, path, count) for path in request.texts]
        names = [path.name for path in request.texts]
    else:
        made = chats(model, 3, count, progress)
        texts, turns = [ids for ids, _ in made], [starts for _, starts in made]
        names = [f"chat {i + 1}, written by the model" for i in range(len(texts))]
    lengths = sorted({min(length, limit) for length in request.needle_lengths})
    room = max(sum(map(len, texts)), max(lengths, default=0)) + 4096
    facts = about(
        model.device, threads=request.threads, model=model.spec.name, backend=model.backend_name
    )
    report = Report(facts, names, sum(map(len, texts)), request.needles)
    readers = _readers(file, model, request, room, report)
    _score(report, readers, texts, progress)
    for row, reader in zip(report.rows, readers, strict=True):
        for length in lengths:
            text = needles(model.tokenizer, length, request.needles)
            row.needles[str(length)] = reader.recall(text)
            progress(f"needles: {row.kv}, {length} tokens")
    if turns:
        talks = list(zip(texts, turns, strict=True))
        for policy in policies(count // 2):
            found = _policy(readers[0], policy, talks, count // 2)
            report.policies += [found] if found is not None else []
            progress(f"policy: {policy}")
    return report


def _policy(
    reader: Reader, policy: str, talks: Sequence[tuple[list[int], list[int]]], context: int
) -> PolicyRow | None:
    """What the policy loses in these chats, with plain pages."""
    limits = Limits(
        context=context,
        reserve=context // 8,
        trained=reader.model.spec.context_limit,
        page_tokens=reader.pool.page_size,
    )
    return measure_policy(
        policy, talks, limits, reader.read, reader.store, lambda: reader.tables(1)[0]
    )


def _readers(
    file: ModelFile, model: Model, request: Request, room: int, report: Report
) -> list[Reader]:
    """One a format that the device has, the plain one first."""
    readers: list[Reader] = []
    for name in dict.fromkeys(("bf16", *request.formats)):
        kv = KVFormat(name, request.keep_layers if name != "bf16" else ())
        # Captured steps belong to one pool: on a device each format has a model of its own.
        own = model
        if readers and model.device != "cpu":
            own, _ = load_model(file, model.device)
        try:
            readers.append(Reader(own, kv, room))
        except BackendUnavailable as error:
            report.missing[name] = error.message
            continue
        size, plain = readers[-1].pool.token_bytes, readers[0].pool.token_bytes
        report.rows.append(Row(name, size, plain / size))
    return readers


def _score(
    report: Report,
    readers: Sequence[Reader],
    texts: Sequence[Sequence[int]],
    progress: Callable[[str], None],
) -> None:
    """Perplexity, KL and top-1 of each format, and whether company changes bits."""
    sums = [_Sums() for _ in readers]
    tables = [reader.tables(len(texts)) for reader in readers]
    step = readers[0].model.max_step_rows
    first: list[Logits] = []
    at = [0] * len(texts)
    while any(start < len(ids) for start, ids in zip(at, texts, strict=True)):
        live = [i for i, ids in enumerate(texts) if at[i] < len(ids)]
        # Shares of different size, so that lengths stay ragged.
        shares = _shares(step, len(live))
        parts = [texts[i][at[i] : at[i] + share] for i, share in zip(live, shares, strict=True)]
        behind = [
            texts[i][at[i] + k + 1] if at[i] + k + 1 < len(texts[i]) else -1
            for i, part in zip(live, parts, strict=True)
            for k in range(len(part))
        ]
        base: torch.Tensor | None = None
        for n, reader in enumerate(readers):
            logits = reader.read([tables[n][i] for i in live], parts)
            if not any(at):
                first.append(logits)
            found = torch.as_tensor(logits).log_softmax(-1)
            base = found if base is None else base
            sums[n].add(base, found, torch.tensor(behind))
        for i, part in zip(live, parts, strict=True):
            at[i] += len(part)
        progress(f"scored {sum(at):,} of {report.tokens:,} tokens")
    for row, reader, own, total, pages in zip(
        report.rows, readers, first, sums, tables, strict=True
    ):
        for table in pages:
            table.release()
        row.perplexity, row.kl, row.top1 = total.result()
        row.experimental = row.kl > KL_BARS.get(row.kv, math.inf)
        row.differing = _differing(reader, texts, own)


def _differing(reader: Reader, texts: Sequence[Sequence[int]], together: Logits) -> int:
    """Rows of the first step that have other bits when each text is read alone, id by id."""
    shares = _shares(reader.model.max_step_rows, len(texts))
    row = differing = 0
    for ids, share in zip(texts, shares, strict=True):
        (table,) = reader.tables(1)
        for token in ids[:share]:
            alone = reader.read([table], [[token]])[0]
            differing += not np.array_equal(alone, together[row])
            row += 1
        table.release()
    return differing


class _Sums:
    """Of one format over all rows so far."""

    def __init__(self) -> None:
        self.loss = self.kl = self.same = 0.0
        self.scored = self.rows = 0

    def add(self, base: torch.Tensor, found: torch.Tensor, behind: torch.Tensor) -> None:
        """[rows, V] log probabilities of the plain pool and of this one; the id behind each row,
        or -1."""
        scored = behind >= 0
        self.loss -= float(found[scored].gather(1, behind[scored, None]).double().sum())
        self.scored += int(scored.sum())
        if base is not found:
            self.kl += float((base.exp() * (base - found)).sum(-1).double().sum())
        self.same += float((base.argmax(-1) == found.argmax(-1)).sum())
        self.rows += len(found)

    def result(self) -> tuple[float, float, float]:
        """Perplexity, mean KL, share of equal likeliest tokens."""
        return math.exp(self.loss / self.scored), self.kl / self.rows, self.same / self.rows


def _shares(rows: int, count: int) -> list[int]:
    """Rows of a step for each of so many texts: half of what is left, the last one all of it."""
    shares: list[int] = []
    for left in range(count, 0, -1):
        free = rows - sum(shares)
        shares.append(free if left == 1 else max(1, min(free // 2, free - left + 1)))
    return shares


def _read_text(model: Model, path: Path, tokens: int) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}.", hint="Name a UTF-8 file.") from error
    ids = model.tokenizer.encode(text, special=False)[:tokens]
    if len(ids) < 2:
        raise UsageError(f"{path} has no text.", hint="Name a longer one.")
    return ids
