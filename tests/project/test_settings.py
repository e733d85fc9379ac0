"""Where a setting comes from, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from chatkv.errors import ConfigError
from chatkv.models.catalog import DEFAULT_MODEL, cache_dir
from tui import schema
from tui.settings import load

FILE = """\
model = "SmolLM2-135M-Instruct"
threads = 2
[sampling]
temperature = 0.5
top_p = 0.9
stop = ["END"]
[kv]
disk_max = "2GiB"
[keys]
"chat.stop" = "escape,ctrl+x"
[profiles.repeatable]
sampling.temperature = 0.0
spec.mode = "none"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "chatkv.toml"
    path.write_text(FILE)
    return path


def test_flag_env_profile_file_default(file):
    env = {"CHATKV_SAMPLING_TOP_P": "0.8", "CHATKV_THREADS": "3"}
    found = load({"threads": "4"}, config=str(file), env=env, profile="repeatable")
    got = {key: (v.value, v.origin) for key, v in found.values.items()}
    assert got["threads"] == (4, "flag")
    assert got["sampling.top_p"] == (0.8, "env")
    assert got["sampling.temperature"] == (0.0, "profile")
    assert got["spec.mode"] == ("none", "profile")
    assert got["sampling.stop"] == (("END",), "file")
    assert got["sampling.top_k"] == (0, "default")
    assert got["kv.disk_max"] == (2 << 30, "file")
    assert found["keys"] == {"chat.stop": "escape,ctrl+x"}
    assert found.demanded("sampling") == {"top_p": 0.8}
    assert found.values["kv.disk_max"].where == f"{file}, line 8"


def test_a_profile_is_chosen_by_flag_or_environment(file):
    assert load(config=str(file), env={})["sampling.temperature"] == 0.5
    assert load(config=str(file), env={"CHATKV_PROFILE": "repeatable"})["spec.mode"] == "none"
    with pytest.raises(ConfigError, match="no profile 'fast'") as error:
        load(config=str(file), env={}, profile="fast")
    assert "repeatable" in error.value.hint


@pytest.mark.parametrize(
    ("text", "line", "near"),
    [
        ("[sampling]\n\ntemprature = 0\n", 3, "sampling.temperature"),
        ("modle = 'x'\n", 1, "model"),
        ("model = 'x'\n[context]\nlimits = 3\n", 3, "context.limit"),
        ("[profiles.x]\nspec.mod = 'none'\n", 2, "spec.mode"),
        ("sampling = 3\n", 1, None),
    ],
)
def test_unknown_keys_name_the_line_and_the_nearest(tmp_path, text, line, near):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(config=str(path), env={})
    assert f"line {line})" in error.value.message
    if near:
        assert error.value.hint == f"Did you mean {near}?"


@pytest.mark.parametrize(
    "text",
    [
        "threads = 0",
        "threads = 1.5",
        "threads = true",
        "sampling.temperature = -1",
        "sampling.temperature = nan",
        "sampling.top_p = 0",
        "sampling.top_p = 1.1",
        "sampling.max_tokens = 0",
        "sampling.stop = ['']",
        "spec.mode = 'tree'",
        "spec.drafters = 'ngram,,'",
        "kv.disk_max = '4 gigs'",
        f"kv.disk_max = '{'9' * 400}'",
        "kv.host_max = '9000000000G'",
        "kv.codec = 'zip'",
        "ui.ascii = 'maybe'",
        "model = ''",
        "keys = 'x'",
    ],
)
def test_unreadable_values_name_the_line(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(f"# first\n{text}\n")
    with pytest.raises(ConfigError) as error:
        load(config=str(path), env={})
    assert "line 2" in error.value.hint
    assert text.split(" ")[0] in error.value.message


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("256M", 256 << 20), ("4GiB", 4 << 30), ("4GB", 4 * 10**9), ("1.5k", 1536), ("0", 0)],
)
def test_sizes_as_people_write_them(text, num_bytes):
    assert load({"kv.host_max": text}, env={})["kv.host_max"] == num_bytes


@pytest.mark.parametrize(
    ("key", "raw", "wanted"),
    [
        ("sampling.max_tokens", str(2**63), f"a whole number from 1 to {2**63 - 1}"),
        ("sampling.logprobs", "21", "a whole number from 0 to 20"),
        ("sampling.logprobs", "-1", "a whole number from 0 to 20"),
        ("sampling.max_tokens", "0", "a whole number of 1 or more"),
        ("spec.mode", "tree:63", "tree:N with N from 1 to 62"),
        ("sampling.stop", "", "none of them empty"),
        ("sampling.temperature", "99", "0.01 to 2, above which text is noise"),
        ("sampling.temperature", "2.01", "0.01 to 2, above which text is noise"),
        ("sampling.temperature", "0.001", "0.01 to 2, above which text is noise"),
        ("sampling.temperature", "-1", "0.01 to 2, above which text is noise"),
        ("sampling.min_p", "1.5", "a number from 0 to 1"),
        ("sampling.presence_penalty", "3", "a number from -2 to 2"),
        ("sampling.top_p", "0", "a number above 0, up to 1"),
    ],
)
def test_a_value_out_of_range_is_told_the_range(key, raw, wanted):
    with pytest.raises(ConfigError) as error:
        schema.read(key, raw)
    assert error.value.message.endswith(f"{wanted}.")


@pytest.mark.parametrize("data", [b"model =", b"\xff\xfe", b"[profiles]\nx = 1\n"])
def test_a_file_that_is_no_settings_file(tmp_path, data):
    path = tmp_path / "c.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"c\.toml"):
        load(config=str(path), env={})


def test_a_named_file_must_exist_and_the_usual_one_need_not(tmp_path):
    with pytest.raises(ConfigError, match=r"no settings file .*x\.toml"):
        load(config=str(tmp_path / "x.toml"), env={})
    with pytest.raises(ConfigError):
        load(env={"CHATKV_CONFIG": str(tmp_path / "x.toml")})
    assert load(env={})["model"] == DEFAULT_MODEL


def test_environment_variables():
    assert load(env={"CHATKV_CONTEXT_LIMIT": "512"})["context.limit"] == 512
    assert load(env={"CHATKV_CONTEXT_LIMIT": ""})["context.limit"] is None
    with pytest.raises(ConfigError, match="CHATKV_TEMPERATURE") as error:
        load(env={"CHATKV_TEMPERATURE": "0"})
    assert "CHATKV_SAMPLING_TEMPERATURE" in error.value.hint
    with pytest.raises(ConfigError) as error:
        load(env={"CHATKV_THREADS": "many"})
    assert "CHATKV_THREADS" in error.value.hint
    load(env={"CHATKV_KILLS": "100", "CHATKV_REQUIRE": "gpu"})


def test_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "d"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "s"))
    usual = load(env={}).folders
    assert usual.chat_db == tmp_path / "d/chatkv/chat.db"
    assert usual.kv_db == tmp_path / "d/chatkv/kv/kv.db"
    assert usual.state == tmp_path / "s/chatkv"
    assert usual.cache == cache_dir()
    moved = load(env={}, data_dir=str(tmp_path / "here")).folders
    assert (moved.data, moved.state) == (tmp_path / "here", tmp_path / "here/state")
    apart = load(env={"CHATKV_KV_DIR": str(tmp_path / "kv"), "CHATKV_DATA_DIR": "/x"}).folders
    assert (str(apart.data), apart.kv_db) == ("/x", tmp_path / "kv/kv.db")
    assert not any(path.exists() for path in (moved.data, apart.kv))


@given(st.sampled_from(list(schema.SETTINGS)), st.text() | st.integers() | st.floats() | st.none())
@profile(deadline=None, max_examples=300)
def test_a_value_is_read_or_refused_and_never_breaks(key, raw):
    try:
        value = schema.read(key, raw)
    except ConfigError:
        return
    assert schema.read(key, value) == value


def test_options_by_name():
    assert schema.key_of("temperature") == "sampling.temperature"
    assert schema.key_of("spec.mode") == "spec.mode"
    with pytest.raises(ConfigError) as error:
        schema.key_of("tempretaure")
    assert error.value.hint == "Did you mean temperature?"


def test_config_show_and_path(chatkv, monkeypatch, tmp_path):
    monkeypatch.setenv("CHATKV_THREADS", "3")
    rows = {row["key"]: row for row in chatkv("config", "show", "--json").json["settings"]}
    assert set(rows) == set(schema.SETTINGS)
    assert (rows["threads"]["value"], rows["threads"]["origin"]) == (3, "env")
    assert "CHATKV_THREADS" in chatkv("config", "show").out
    data = chatkv("config", "path", "--json").json
    assert data["chat_db"] == str(tmp_path / "data" / "chat.db")
    assert "chat.db" in chatkv("config", "path").out
    assert not (tmp_path / "data").exists()
