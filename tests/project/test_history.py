"""What the terminal lets the engine's process read of other chats."""

from __future__ import annotations

from pathlib import Path

from tui.settings import load
from tui.wiring import engine_options


def test_an_ephemeral_engine_knows_no_chats(tmp_path: Path) -> None:
    settings = load(data_dir=str(tmp_path), env={})
    assert settings["spec.drafters"] == ("auto",)
    saved = engine_options(settings, "model", ephemeral=False)
    assert saved["chat_db"] == str(tmp_path / "chat.db")
    hidden = engine_options(settings, "model", ephemeral=True)
    assert hidden["chat_db"] is None
    assert str(tmp_path) not in str(hidden)
