"""What can be known of a model here without loading it: its tokenizer, the name of its weights.

Imports nothing heavy before it is asked. Knows the catalogue's files and the converted folders.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from chatkv.errors import ModelError

if TYPE_CHECKING:
    from chatkv.models.catalog import ModelFile
    from chatkv.tokenizer import Tokenizer


def tokenizer_of(name: str) -> Tokenizer | None:
    """The tokenizer of a model, or None: it is not here, or was never loaded."""
    from chatkv.models import catalog

    try:
        file = catalog.find(name)
        if file.kind == "folder":
            from chatkv.models.folder import ModelFolder

            return ModelFolder(file.path).tokenizer()
        if file.kind == "gguf":
            from chatkv.tokenizer import Tokenizer

            return Tokenizer.from_file(_converted(file) / "tokenizer.json")
    except (ModelError, OSError):
        pass
    return None


def weights_digest(file: ModelFile) -> str:
    """The name of a model's weights in the identity of its pages; empty for random weights.

    Raises ModelError or OSError if the file cannot be read.
    """
    if file.kind == "folder":
        from chatkv.models.folder import ModelFolder

        return ModelFolder(file.path).spec.weights_digest
    if file.kind == "random":
        return ""
    try:
        manifest = json.loads((_converted(file) / "manifest.json").read_bytes())
        return str(manifest["spec"]["weights_digest"])
    except (OSError, ValueError, KeyError, TypeError):
        from chatkv.models.gguf_file import GgufFile

        return GgufFile(file.path, file.name).spec.weights_digest


def _converted(file: ModelFile) -> Path:
    """Where the model lies once it was loaded. Raises OSError."""
    from chatkv.models import catalog, weights

    sha256 = weights.known_sha256(file.path)
    return catalog.cache_dir() / "converted" / f"{sha256[:32]}-{weights.CONVERTER}"
