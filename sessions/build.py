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
from chatkv.models import catalog
from chatkv.models.devices import load_model
from sessions.pages import open_page_store
from sessions.service import EngineService

Progress = Callable[[str, int, int], None]


def build_service(options: Mapping[str, Any], progress: Progress | None = None) -> EngineService:
    """An engine as the options ask for.

    Args:
        options: `model` (name or path), and maybe `device` (auto by default), `threads`,
            `context`, `spec`, `drafters`, `kv_path` (None: no pages on disk), `kv_limit_bytes`.
        progress: Called with stage, bytes done, bytes in all.

    Raises:
        ModelError: The model cannot be found or loaded.
        BackendUnavailable: The device is not here, or cannot run this model.
        ConfigError: An option makes no sense.
    """
    config = EngineConfig(
        threads=options.get("threads"),
        context_limit=options.get("context"),
        spec=options.get("spec") or "auto",
        drafters=tuple(options.get("drafters") or ("ngram",)),
    )
    model, notice = load_model(
        catalog.find(options["model"]),
        options.get("device") or "auto",
        threads=config.threads,
        progress=progress,
    )
    store = None
    if options.get("kv_path"):
        spec = model.spec
        limit = config.context_limit or spec.context_limit
        opened = open_page_store(
            Path(options["kv_path"]),
            model.identity(model.page_size),
            context_bytes=limit * 4 * spec.num_layers * spec.num_kv_heads * spec.head_dim,
            limit_bytes=options.get("kv_limit_bytes"),
        )
        store, notice = opened.store, " ".join(filter(None, (notice, opened.notice)))
    salt = store.salt if store is not None else b""
    try:
        engine = Engine(model, config, store=store, salt=salt)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{model.spec.name} and its pages fit {model.device}, but its steps do not.",
            hint="Use a smaller --context, or close what else uses the device.",
        ) from error
    return EngineService(engine, store, notice=notice)
