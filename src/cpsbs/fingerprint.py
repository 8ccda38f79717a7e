"""Fingerprints that tell whether two runs used the same model, whatever it is called."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from cpsbs.loading import EMBEDDED, embedded_models

GGUF = ".gguf"

SUFFIXES = frozenset(
    {GGUF, ".jinja", ".json", ".model", ".py", ".safetensors", ".spm", ".tokenizer", ".txt"}
)
"""The suffixes of the files that make up a model: weights, settings, tokenizer and code.

Weights in ``.bin`` files are pickles, which are never loaded.
"""


def fingerprint(folder: Path, gguf_file: str | None = None) -> str:
    """Return 16 hexadecimal digits that depend on the content of a model's folder.

    The names and the contents of all files directly in the folder that make up a model count; its
    path, other files and subfolders do not. Files are read in blocks, so that large weights need
    little memory.

    Args:
        folder: the folder of a model, as ``save_pretrained`` of transformers writes it.
        gguf_file: the GGUF file that is loaded, if it is one; others in the folder do not count.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        suffix = file.suffix.lower()
        other_weights = gguf_file is not None and suffix == GGUF and file.name != gguf_file
        if suffix in SUFFIXES and not other_weights and file.is_file():
            with file.open("rb") as content:
                own = hashlib.file_digest(content, "sha256").hexdigest()
            # A name cannot contain "/", so that no two folders yield the same bytes.
            digest.update(f"{file.name}/{own}/".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def model_fingerprint(name: str, config: Any) -> str:
    """Return what identifies the content of the model that was loaded by this name.

    This is the fingerprint of the folder that the model came from, the commit of a model from the
    Hugging Face hub, or, for a model that came from neither, its name.

    A folder is read when this function is called: call it right after loading. If the folder
    changes between loading and this call, the fingerprint is that of the new content, and a later
    run on the new content would be taken for the same model.

    Args:
        name: an embedded model, a folder, a GGUF file in a folder, or an id on the hub.
        config: the model's configuration, which knows the commit.
    """
    folder = EMBEDDED / name if name in embedded_models() else Path(name)
    if folder.is_dir():
        return fingerprint(folder)
    if folder.suffix.lower() == GGUF and folder.is_file():
        return fingerprint(folder.parent, folder.name)
    commit = getattr(config, "_commit_hash", None)
    return f"{name}@{commit}" if commit else name
