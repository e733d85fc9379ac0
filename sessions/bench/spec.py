"""Drafting against plain decoding on one model: the same ids, proved first, and both clocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.errors import ModelError, UsageError
from chatkv.models.catalog import ModelFile
from chatkv.models.devices import load_free, load_model
from chatkv.models.model import Model
from chatkv.sampling import SamplingParams
from chatkv.spec.drafters import AUTO, check_names, drafters_for, expect_draft_model
from chatkv.spec.plan import Shape
from chatkv.spec.token_log import TokenIndex
from sessions.bench.about import about
from sessions.bench.measure import Memory, Peak
from sessions.bench.spec_play import Duel, Identity, Pair, play
from sessions.bench.spec_row import Row
from sessions.bench.spec_tax import Tax, measure_tax
from sessions.build import load_draft
from sessions.verify import BUILT_IN, Prompt, read_prompts


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure."""

    prompts: tuple[Path, ...] = ()
    """JSONL files or folders of them; none plays a few built-in ones."""
    limit: int | None = None
    """Prompts at most."""
    max_tokens: int = 128
    """Of each reply."""
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    modes: tuple[str, ...] = ("auto",)
    drafters: tuple[str, ...] = (AUTO,)
    draft_model: str | None = None
    device: str = "auto"
    kv_dtype: str = "bf16"
    keep_layers: tuple[int, ...] = ()
    threads: int | None = None
    rounds: int = 1
    """Times each prompt is played plain, drafted, drafted, plain."""


@dataclass(slots=True)
class Report:
    """What was measured, and on what."""

    about: dict[str, Any]
    device: str
    kv_dtype: str
    drafters: tuple[str, ...]
    """Those that were asked."""
    identity: Identity = field(default_factory=Identity)
    rows: list[Row] = field(default_factory=list[Row])
    """Empty if any reply differs: then there is no speed to speak of."""
    plain_memory: Memory = field(default_factory=Memory)
    """Peak of an engine with its pages over its model."""
    drafted_memory: Memory = field(default_factory=Memory)
    failures: list[str] = field(default_factory=list[str])
    """Drafters that were switched off because they raised, or returned nonsense."""
    tax: Tax = field(default_factory=Tax)

    def to_json(self) -> dict[str, Any]:
        """For `--json` and the raw results."""
        return {"bench": "spec", **asdict(self)}


def measure(
    file: ModelFile,
    request: Request,
    progress: Callable[[str], None] = lambda text: None,
    on_row: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Play all prompts at every temperature and in every mode.

    Args:
        progress: Called with one line after each prompt.
        on_row: Called with what there is after each row.

    Raises:
        UsageError: There is nothing to play or to time, or a file cannot be read.
        ConfigError: A drafter or a mode that is unknown.
        ModelError: The model, a draft model or its heads cannot be loaded.
        BackendUnavailable: The device is not here, or cannot run the model.
    """
    prompts = list(read_prompts(request.prompts)) if request.prompts else _built_in()
    prompts = prompts[: request.limit]
    if not prompts:
        raise UsageError("There is no prompt to play.", hint="Name another file with --prompts.")
    names = tuple(check_names(request.drafters))
    expect_draft_model(names, request.draft_model)
    for mode in request.modes:
        if Shape.parse(mode).kind == "none":
            raise UsageError(
                "Mode 'none' is what the others are compared with; it is always measured.",
                hint="Name auto, chain:N or tree:N.",
            )
    progress(f"loading {file.name} ...")
    try:
        bench = _Bench(file, request, prompts, names)
        if bench.notice:
            progress(bench.notice)
        for temperature in request.temperatures:
            for mode in request.modes:
                bench.run(temperature, mode, progress)
                on_row(bench.report)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{file.name} does not fit the device twice, with the pages of two engines.",
            hint="Use a smaller model, or close what else uses the device.",
        ) from error
    if not bench.report.rows and not bench.report.identity.different:
        raise UsageError(
            "Every reply ended with its first token, so there was no step to time.",
            hint="Name other prompts, or raise --max-tokens.",
        )
    return bench.report


class _Bench:
    """The models, which are loaded once, and the report that grows."""

    def __init__(
        self, file: ModelFile, request: Request, prompts: list[Prompt], names: tuple[str, ...]
    ) -> None:
        self.request, self.prompts, self.names = request, prompts, names
        self.categories = _categories(request.prompts)
        self.held: dict[str, Any] = {
            "kv_dtype": request.kv_dtype,
            "keep_layers": request.keep_layers,
        }
        model, self.notice = load_model(file, request.device, threads=request.threads)
        # Captured steps belong to one pool: on a device two engines that take turns need two.
        self.is_cuda = model.device.startswith("cuda")
        self.model: Model = model
        plain = load_model(file, model.device)[0] if self.is_cuda else model
        self.draft: Model | None = None
        if request.draft_model and "draft_model" in names:
            self.draft = load_draft(request.draft_model, model, request.threads)
        self.report = Report(
            about(
                model.device,
                threads=request.threads,
                model=model.spec.name,
                dtype=str(model.identity(model.page_size).get("pool_dtype", "")) or None,
                backend=model.backend_name,
            ),
            model.device,
            request.kv_dtype,
            tuple(drafters_for(names, model, history=True)),
        )
        made: list[Engine] = []

        def first() -> None:
            made.append(Engine(plain, EngineConfig(spec="none", drafters=(), **self.held)))
            play(made[0], prompts[0], self._params(0, request.temperatures[0]))

        if not self.is_cuda:
            first()  # what compiling takes is nobody's
            made.clear()
        self.report.plain_memory = Peak(model.device).over(first)
        self.plain = made[0]
        self.report.tax = measure_tax(
            lambda: load_free(file, model.device),
            self.plain,
            [
                (prompt, self._params(i, request.temperatures[0]))
                for i, prompt in enumerate(prompts)
            ],
        )

    def run(self, temperature: float, mode: str, progress: Callable[[str], None]) -> None:
        """Measure one temperature in one mode, with an engine that has drafted nothing yet."""
        log = TokenIndex()
        config = EngineConfig(spec=mode, drafters=self.names, **self.held)
        made: list[Duel] = []

        def first() -> None:
            drafted = Engine(self.model, config, token_log=log, draft=self.draft)
            made.append(Duel(self.plain, drafted, log))
            made[0].warm_up(self.prompts[0], self._params(0, temperature))

        if not self.report.identity.prompts:
            self.report.drafted_memory = Peak(self.model.device).over(first)
        else:
            first()
        (duel,) = made
        if self.is_cuda:
            # A step is captured when its size first comes up.
            for place, prompt in enumerate(self.prompts):
                duel.warm_up(prompt, self._params(place, temperature))
        pairs: list[Pair] = []
        identity = self.report.identity
        for place, prompt in enumerate(self.prompts):
            params = self._params(place, temperature)
            pairs += duel.play(prompt, params, self.request.rounds, identity)
            progress(
                f"temperature {temperature:g}, {mode}: {place + 1}/{len(self.prompts)} prompts, "
                f"{identity.different} different"
            )
        for text in duel.drafted.drafting.drafters.failures:
            if text not in self.report.failures:
                self.report.failures.append(text)
        row = Row.of(temperature, duel.controller, pairs, self.categories)
        if identity.different:
            self.report.rows.clear()
        elif row is not None:
            self.report.rows.append(row)

    def _params(self, place: int, temperature: float) -> SamplingParams:
        """Each prompt has its own seed."""
        return SamplingParams(
            temperature=temperature, max_tokens=self.request.max_tokens, seed=place + 1
        )


def _built_in() -> list[Prompt]:
    return [Prompt(*one) for one in BUILT_IN]


def _categories(paths: tuple[Path, ...]) -> dict[str, str]:
    """The `category` of the prompts that have one, by id; the files are known to be readable."""
    found: dict[str, str] = {}
    for path in paths:
        for file in sorted(path.glob("**/*.jsonl")) if path.is_dir() else [path]:
            for line in filter(str.strip, file.read_text(encoding="utf-8").split("\n")):
                data = json.loads(line)
                if "id" in data and isinstance(data.get("category"), str):
                    found[str(data["id"])] = data["category"]
    return found
