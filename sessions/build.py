"""Builds an engine and what serves it from plain options. Imports torch: only the engine's process
loads this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.errors import ModelError
from chatkv.kv.format import KVFormat
from chatkv.models import catalog
from chatkv.models.devices import load_model
from chatkv.models.model import Model
from chatkv.spec.drafters import AUTO, check_names, drafters_for, expect_draft_model
from chatkv.spec.drafters.draft_model import expect_same_tokenizer
from chatkv.spec.drafters.heads import find_heads
from chatkv.spec.memory import DraftMemory
from chatkv.tokenizer import Tokenizer
from sessions.bench.about import device_facts
from sessions.deletion import work_off_at_start
from sessions.pages import open_page_store
from sessions.retention import default_host_bytes
from sessions.service import EngineService
from sessions.token_log import StoredLog

Progress = Callable[[str, int, int], None]
PLAIN_BYTES = 2
"""Of a value in a pool that is not quantised, as far as the budget of kv.db is concerned."""


def build_service(options: Mapping[str, Any], progress: Progress | None = None) -> EngineService:
    """An engine as the options ask for.

    Args:
        options: `model` (name or path), and maybe `device` (auto by default), `threads`,
            `context`, `spec`, `drafters`, `kv_path` (None: no pages on disk), `kv_limit_bytes`,
            `kv_restore`, `host_bytes` (None: a tenth of the memory, 4 GiB at most), `chat_db`
            (None: the drafter `history` has no other chats to copy from), `draft_model` (name or
            path, of the drafter of that name), `kv_dtype`, `keep_layers`.
        progress: Called with stage, bytes done, bytes in all.

    Raises:
        ModelError: The model cannot be found or loaded.
        BackendUnavailable: The device is not here, or cannot run this model.
        ConfigError: An option makes no sense.
    """
    drafters: list[str] = list(options.get("drafters") or (AUTO,))
    if options.get("draft_model") and "draft_model" not in drafters:
        drafters.append("draft_model")
    check_names(drafters)
    expect_draft_model(drafters, options.get("draft_model"))
    host = options.get("host_bytes")
    config = EngineConfig(
        threads=options.get("threads"),
        context_limit=options.get("context"),
        spec=options.get("spec") or "auto",
        drafters=tuple(drafters),
        kv_dtype=options.get("kv_dtype") or "bf16",
        keep_layers=tuple(options.get("keep_layers") or ()),
        restore=options.get("kv_restore") or "auto",
        host_bytes=default_host_bytes() if host is None else int(host),
    )
    kv = KVFormat(config.kv_dtype, config.keep_layers)
    model, notice = load_model(
        catalog.find(options["model"]),
        options.get("device") or "auto",
        threads=config.threads,
        progress=progress,
    )
    notice = " ".join(filter(None, (notice, template_notice(model.tokenizer))))
    store = None
    if options.get("kv_path"):
        spec = model.spec
        limit = config.context_limit or spec.context_limit
        opened = open_page_store(
            Path(options["kv_path"]),
            model.identity(model.page_size, kv),
            context_bytes=limit
            * kv.token_bytes(spec.num_layers, spec.num_kv_heads, spec.head_dim, PLAIN_BYTES),
            limit_bytes=options.get("kv_limit_bytes"),
        )
        store = opened.store
        changed = store.recognise(spec.name) if store is not None else ""
        notice = " ".join(filter(None, (notice, opened.notice, changed)))
    if store is not None and options.get("chat_db"):
        work_off_at_start(Path(options["chat_db"]), store)
    salt = store.salt if store is not None else b""
    log = None
    reads = bool(options.get("chat_db"))
    drafters = drafters_for(drafters, model, history=reads)
    if reads and "history" in drafters:
        log = StoredLog(Path(options["chat_db"]), model.tokenizer.tok_fp())
    draft = None
    if "draft_model" in drafters:
        draft = load_draft(options["draft_model"], model, config.threads)
    memory = DraftMemory(
        catalog.cache_dir() / "drafting",
        {
            **model.identity(model.page_size, kv),
            **device_facts(model.device, config.threads),
            "drafters": drafters,
            "heads": str(find_heads(model)) if "heads" in drafters else None,
        },
    )
    try:
        engine = Engine(
            model, config, store=store, salt=salt, token_log=log, draft=draft, memory=memory
        )
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{model.spec.name} and its pages fit {model.device}, but its steps do not.",
            hint="Use a smaller --context, or close what else uses the device.",
        ) from error
    if log is not None:
        log.start()
    return EngineService(engine, store, log, notice=notice)


def template_notice(tokenizer: Tokenizer) -> str:
    """One sentence if the model's chat template rewrites old turns, else nothing."""
    try:
        if tokenizer.prefix_stable():
            return ""
    except ModelError:  # it refuses some history: the prompt that it refuses will say so
        return ""
    return (
        "The model's chat template writes old turns in another way than new ones; stored turns "
        "stay as they were, so nothing is computed twice."
    )


def load_draft(name: str, model: Model, threads: int | None) -> Model:
    """The smaller model of the drafter `draft_model`, on the device of the model it guesses for.

    Raises:
        ModelError: It cannot be loaded, or has another tokenizer; names the first difference.
    """
    draft, _ = load_model(catalog.find(name), model.device, threads=threads)
    expect_same_tokenizer(model.tokenizer, draft.tokenizer)
    return draft
