"""Where a setting comes from. The only module that reads settings files and the environment.

Knows names, kinds and defaults. Opens no store, loads no model.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatkv.errors import ConfigError
from tui.schema import PREFIX, SETTINGS, nearest, read

FILE_NAME = "chatkv.toml"
PLACES = {
    "CHATKV_CONFIG": "settings file",
    "CHATKV_DATA_DIR": "folder of conversations and state",
    "CHATKV_KV_DIR": "folder of kv.db",
    "CHATKV_CACHE_DIR": "folder of converted models",
    "CHATKV_PROFILE": "a [profiles.NAME] table of the settings file",
}
"""Environment variables that name places, not settings."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value and what set it."""

    value: Any
    origin: str
    """`flag`, `env`, `profile`, `file` or `default`."""
    where: str = ""


@dataclass(frozen=True, slots=True)
class Folders:
    """Where files live. Nothing is created here."""

    config: Path
    data: Path
    state: Path
    cache: Path
    kv: Path

    @property
    def chat_db(self) -> Path:
        """The conversations."""
        return self.data / "chat.db"

    @property
    def drafts(self) -> Path:
        """What was typed and not sent, a file for each chat."""
        return self.data / "drafts"

    @property
    def kv_db(self) -> Path:
        """The pages; may be deleted at any time."""
        return self.kv / "kv.db"

    @property
    def engine_log(self) -> Path:
        """What the engine process writes to its stderr."""
        return self.state / "engine.log"


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, each with its origin, and the folders."""

    values: Mapping[str, Value]
    folders: Folders

    def __getitem__(self, key: str) -> Any:
        return self.values[key].value

    def group(self, name: str) -> dict[str, Any]:
        """The values under `name.`, by their last name."""
        start = name + "."
        return {
            key[len(start) :]: v.value for key, v in self.values.items() if key.startswith(start)
        }

    def demanded(self, name: str) -> dict[str, Any]:
        """Those of a group that a flag or the environment set: they win over a chat's own."""
        return {
            key: value
            for key, value in self.group(name).items()
            if self.values[f"{name}.{key}"].origin in ("flag", "env")
        }


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    config: str | None = None,
    data_dir: str | None = None,
    profile: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Settings:
    """Settings by flag, then `CHATKV_*`, profile, file, default.

    Args:
        flags: Dotted key to value; a value of None is a flag that was not given.
        config: The settings file; it must exist. None looks for the user's.
        data_dir: Folder for data and state.
        profile: A `[profiles.NAME]` table of the file.
        env: The environment; the process's own by default.

    Raises:
        ConfigError: An unknown name (with the nearest one and its line) or an unreadable value.
    """
    env = os.environ if env is None else env
    named = config or env.get("CHATKV_CONFIG") or None
    folders = _folders(env, data_dir or env.get("CHATKV_DATA_DIR") or None, named)
    file = _read_file(folders.config, must_exist=named is not None)
    layers = [
        _layer("flag", (flags or {}).items(), lambda key: "the command line"),
        _environment(env),
        file.profile(profile or env.get("CHATKV_PROFILE") or None),
        file.settings(),
    ]
    values = {}
    for key, setting in SETTINGS.items():
        found = next((layer[key] for layer in layers if key in layer), None)
        values[key] = found or Value(setting.default, "default")
    return Settings(values, folders)


def _layer(
    origin: str, items: Any, where: Callable[[str], str], setting_of: Callable[[str], str] = str
) -> dict[str, Value]:
    layer = {}
    for name, raw in items:
        if raw is None:
            continue
        key = setting_of(name)
        layer[key] = Value(read(key, raw, where(name)), origin, where(name))
    return layer


def _environment(env: Mapping[str, str]) -> dict[str, Value]:
    by_env = {setting.env: key for key, setting in SETTINGS.items() if key != "keys"}
    for name in env:
        if name.startswith(PREFIX) and name not in by_env and name not in PLACES:
            # Tests and makefiles have variables of their own: only a near miss is a mistake.
            close = difflib.get_close_matches(name, [*by_env, *PLACES], 1, 0.8)
            if close:
                raise ConfigError(
                    f"There is no environment variable {name}.", hint=f"Did you mean {close[0]}?"
                )
    given = [(name, env[name]) for name in by_env if env.get(name)]
    return _layer("env", given, str, by_env.__getitem__)


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    source: str
    table: dict[str, Any]
    profiles: dict[str, Any]

    def settings(self) -> dict[str, Value]:
        return self._read("file", self.table, "")

    def profile(self, name: str | None) -> dict[str, Value]:
        # All of them are read, so that a mistake shows before the day it is needed.
        layers = {
            key: self._read("profile", table, f"profiles.{key}.")
            for key, table in self.profiles.items()
        }
        if name is None:
            return {}
        if name not in layers:
            raise ConfigError(
                f"There is no profile {name!r} in {self.path}.",
                hint=f"It has: {', '.join(layers) or 'none'}.",
            )
        return layers[name]

    def _read(self, origin: str, table: dict[str, Any], prefix: str) -> dict[str, Value]:
        items = list(_leaves(table))
        for key, _ in items:
            if key not in SETTINGS:
                raise ConfigError(
                    f"There is no setting {prefix}{key} ({self._where(prefix + key)}).",
                    hint=nearest(key, list(SETTINGS)),
                )
        return _layer(origin, items, lambda key: self._where(prefix + key))

    def _where(self, key: str) -> str:
        line = _line_of(self.source, key)
        return f"{self.path}" + (f", line {line}" if line else "")


def _read_file(path: Path, *, must_exist: bool) -> _File:
    import tomllib  # not needed by those who have no file

    try:
        source = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(
                f"There is no settings file {path}.", hint="Check --config."
            ) from None
        source = ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The settings file {path} cannot be read: {error}.") from None
    try:
        table = tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"The settings file {path} is not TOML: {error}.", hint="Correct that line."
        ) from None
    profiles = table.pop("profiles", {})
    if not isinstance(profiles, dict) or not all(isinstance(p, dict) for p in profiles.values()):
        raise ConfigError(f"profiles in {path} must be tables.", hint="Write [profiles.NAME].")
    return _File(path, source, table, profiles)


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and key not in SETTINGS:
            yield from _leaves(value, key + ".")
        else:
            yield key, value


def _line_of(source: str, key: str) -> int | None:
    # tomllib keeps no places. Dotted keys may stand under any table header, so both are joined.
    table = ""
    for number, line in enumerate(source.splitlines(), 1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            table = header[1].strip() + "."
        elif (entry := re.match(r"\s*([\w.\-\"' ]+?)\s*=", line)) and table + entry[1] == key:
            return number
    return None


def _folders(env: Mapping[str, str], data_dir: str | None, config: str | None) -> Folders:
    import platformdirs

    user = platformdirs.PlatformDirs("chatkv", appauthor=False)
    data = _absolute(data_dir) if data_dir else Path(user.user_data_dir)
    return Folders(
        config=_absolute(config) if config else Path(user.user_config_dir) / FILE_NAME,
        data=data,
        state=data / "state" if data_dir else Path(user.user_state_dir),
        cache=_absolute(env.get("CHATKV_CACHE_DIR") or user.user_cache_dir),
        kv=_absolute(env["CHATKV_KV_DIR"]) if env.get("CHATKV_KV_DIR") else data / "kv",
    )


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()
