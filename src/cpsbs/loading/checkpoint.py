"""Finds the files of a model: an embedded one, a folder, or a repository on the hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

EMBEDDED = Path(__file__).parents[1] / "embedded"
"""The folder of the models that come with the package, a subfolder each."""

_BESIDE_GGUF = (
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Files that transformers reads from the folder of a GGUF file, if they are there."""


def embedded_models() -> list[str]:
    """Return the names of the models that come with the package."""
    return sorted(folder.parent.name for folder in EMBEDDED.glob("*/config.json"))


@dataclass(frozen=True)
class Checkpoint:
    """The files of a model: a folder, or one commit of a repository on the hub."""

    name: str
    """The name that the caller gave."""
    where: str
    """The folder, or the id on the hub."""
    revision: str | None = None
    """The commit on the hub: the files that are loaded are those that were checked, and the
    fingerprint of the model names it."""
    gguf: Path | None = None
    """The GGUF file that holds configuration, weights and tokenizer, if the caller named one."""

    @property
    def options(self) -> dict[str, Any]:
        """The arguments with which transformers finds the same files."""
        if self.gguf is not None:
            # The full path: transformers would take a file of that name in the working directory.
            return {"gguf_file": str(self.gguf)}
        return {} if self.revision is None else {"revision": self.revision}

    @property
    def settings_file(self) -> str:
        """The name of the file that describes the model."""
        return "config.json" if self.gguf is None else self.gguf.name

    def file(self, name: str) -> Path | None:
        """Return the path of a file, downloading it if necessary, or None if there is none."""
        return _file(self.name, self.where, name, self.revision)

    def json(self, name: str) -> dict[str, Any] | None:
        """Return the object in a JSON file, or None if there is no such file."""
        file = self.file(name)
        if file is None:
            return None
        with self.explaining(f"{name} cannot be read"):
            content = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError(f"it holds a {type(content).__name__}, not an object")
        return content

    def refuse(self, reason: str, cause: BaseException | None = None) -> NoReturn:
        """Raise a ``ValueError`` whose message begins with the model's name."""
        _refuse(self.name, reason, cause)

    @contextmanager
    def explaining(self, problem: str) -> Iterator[None]:
        """Turn any exception inside the block into a ``ValueError`` that states the problem."""
        with _explaining(self.name, problem):
            yield


def find(name: str | os.PathLike[str], gguf_file: str | None = None) -> Checkpoint:
    """Return the checkpoint of that name.

    Args:
        name: an embedded model, a folder, or an id on the hub.
        gguf_file: the name of a GGUF file in it to load, if any.

    Raises:
        ValueError: if there is no such model, or no such GGUF file in it.
    """
    allowed = (
        f"it must be an embedded model ({', '.join(embedded_models())}), the folder of a model, or "
        "an id on the Hugging Face hub"
    )
    given = os.fspath(name) if isinstance(name, str | os.PathLike) else name
    if not isinstance(given, str):
        raise ValueError(f"name is {quoted(given)}; {allowed}")
    if given in embedded_models():
        return _with_gguf(Checkpoint(given, str(EMBEDDED / given)), gguf_file)
    if os.path.isdir(given):  # unlike pathlib it accepts strings of any kind
        return _with_gguf(Checkpoint(given, given), gguf_file)
    if os.path.exists(given):
        advice = (
            "to load a GGUF file, give its folder as name and the file as gguf_file"
            if given.lower().endswith(".gguf")
            else "give the folder that holds the file"
        )
        raise ValueError(f"name is {quoted(given)}, which is a file; {allowed}. So {advice}")
    if _looks_like_a_path(given):
        raise ValueError(f"name is {quoted(given)}, but this folder does not exist; {allowed}")
    return _find_on_hub(given, gguf_file, allowed)


def _find_on_hub(name: str, gguf_file: str | None, allowed: str) -> Checkpoint:
    from transformers.utils.hub import cached_file, extract_commit_hash

    # A repository of GGUF files has no config.json.
    first = "config.json" if gguf_file is None else _checked_gguf_name(name, gguf_file)
    try:
        found = cached_file(name, first)
    except Exception as error:
        raise ValueError(
            f"name is {quoted(name)}, but there is no such folder, and {first} was not found on "
            f"the hub ({reason_of(error)}); {allowed}"
        ) from error
    revision = extract_commit_hash(found, None)
    if gguf_file is None:
        return Checkpoint(name, name, revision)
    # What is beside the file is downloaded too; then the folder in the hub's cache holds it all.
    for beside in _BESIDE_GGUF:
        _file(name, name, beside, revision)
    path = Path(str(found))
    return Checkpoint(name, str(path.parent), revision, path)


def _with_gguf(folder: Checkpoint, gguf_file: str | None) -> Checkpoint:
    """Return the checkpoint of a folder, with one of its GGUF files if that is asked for."""
    if gguf_file is None:
        return folder
    file = Path(folder.where, _checked_gguf_name(folder.name, gguf_file)).absolute()
    if not file.is_file():
        there = sorted(other.name for other in Path(folder.where).glob("*.gguf"))
        found = f"it has {', '.join(there)}" if there else "it has no GGUF files"
        folder.refuse(f"which has no file {quoted(gguf_file)} (gguf_file); {found}")
    return Checkpoint(folder.name, folder.where, gguf=file)


def _checked_gguf_name(name: str, gguf_file: str) -> str:
    if not is_plain(gguf_file, (".gguf",)):
        raise ValueError(
            f"gguf_file is {quoted(gguf_file)}; it must be the name of a .gguf file in "
            f"{quoted(name)}, without a path"
        )
    return gguf_file


def _looks_like_a_path(name: str) -> bool:
    """Return whether a name cannot be an id on the hub, which has at most one slash."""
    return (
        name.startswith((".", "~")) or name.count("/") > 1 or bool(re.search(r"^/|/$|[\\\0]", name))
    )


def is_plain(name: object, endings: tuple[str, ...]) -> bool:
    """Return whether this is a file name with one of these endings, and no path on any system."""
    return isinstance(name, str) and name.endswith(endings) and not re.search(r"[/\\:\0]", name)


def _file(name: str, where: str, file: str, revision: str | None) -> Path | None:
    from transformers.utils.hub import cached_file

    options = {} if revision is None else {"revision": revision}
    with _explaining(name, f"{file} cannot be found"):
        found = cached_file(where, file, _raise_exceptions_for_missing_entries=False, **options)
    return None if found is None else Path(found)


def _refuse(name: str, reason: str, cause: BaseException | None = None) -> NoReturn:
    raise ValueError(f"name is {quoted(name)}, {reason}") from cause


@contextmanager
def _explaining(name: str, problem: str) -> Iterator[None]:
    # Loading fails for many reasons in many libraries, which share no exception type.
    try:
        yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            _refuse(
                name, "which brings code of its own; it is run only with trust_remote_code", error
            )
        _refuse(name, f"whose {problem}: {reason_of(error)}", error)


def reason_of(error: Exception) -> str:
    """Return the type and the message of an exception in one line of at most 300 characters."""
    words = " ".join(str(error).split())
    line = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return line if len(line) <= 300 else f"{line[:300]}…"


def quoted(value: object) -> str:
    """Return the value as Python writes it, shortened so that a message stays readable."""
    written = repr(value)
    return written if len(written) <= 300 else f"{written[:100]}… ({len(written):,} characters)"
