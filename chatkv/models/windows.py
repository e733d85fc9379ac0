"""Which layers of a model see a window only, as its files say it. Knows settings; no tensor.

A row at position p sees keys at positions above p - window, as in transformers and llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chatkv.errors import BadWeights

DEFAULT, DEFAULT_FULL_LAYERS = 4096, 28
"""What transformers takes for `sliding_window` and `max_window_layers` where a config is silent."""
KINDS = {"full_attention": False, "sliding_attention": True}

Windows = tuple[int | None, ...]


def windows_of(
    path: Path, architecture: str, config: Mapping[str, Any], num_layers: int, limit: int
) -> Windows:
    """The window of each layer by a config.json, read as transformers does; empty if all see all.

    Llama has none; Mistral one in every layer, Ministral in those that `layer_types` names; Qwen2
    and Qwen3 one where `use_sliding_window` is set, in the layers that `layer_types` names, else in
    those from `max_window_layers` on.

    Args:
        path: Of the model, for messages.
        architecture: `llama`, `mistral`, `ministral`, `qwen2` or `qwen3`.
        limit: Positions of the model: a wider window hides nothing.

    Raises:
        BadWeights: The settings contradict each other, or name another kind of layer.
    """
    window = config.get("sliding_window", DEFAULT)
    if architecture == "llama" or window is None:
        slides = [False] * num_layers
    elif architecture.endswith("istral"):
        slides = [True] * num_layers
    elif not config.get("use_sliding_window", False):
        window, slides = None, [False] * num_layers
    else:
        full = int(config.get("max_window_layers", DEFAULT_FULL_LAYERS))
        slides = [layer >= full for layer in range(num_layers)]
    named = architecture not in ("llama", "mistral")
    if named and config.get("layer_types") is not None:
        slides = _slides(path, config["layer_types"])
    return of_layers(path, slides, window, num_layers, limit)


def of_layers(
    path: Path, slides: Sequence[bool], window: int | None, num_layers: int, limit: int
) -> Windows:
    """One window for the layers that slide; empty if it hides nothing from any.

    Raises:
        BadWeights: Not one flag a layer, or no window of one position or more.
    """
    if len(slides) != num_layers:
        raise BadWeights(
            f"{path} says of {len(slides)} layers how far they see, but has {num_layers}.",
            hint="Fetch it again.",
        )
    if not any(slides):
        return ()
    if window is None or int(window) < 1:
        raise BadWeights(
            f"{path} has layers with a sliding window of {window} positions.",
            hint="Fetch it again.",
        )
    if int(window) >= limit:
        return ()
    return tuple(int(window) if slide else None for slide in slides)


def _slides(path: Path, kinds: Sequence[str]) -> list[bool]:
    other = [kind for kind in kinds if kind not in KINDS]
    if other:
        raise BadWeights(
            f"{path} has layers of type {other[0]}.", hint=f"Types that run: {', '.join(KINDS)}."
        )
    return [KINDS[kind] for kind in kinds]
