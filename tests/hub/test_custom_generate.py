"""The folder ``hub`` works as transformers loads it from the Hub."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import dynamic_module_utils

import cpsbs
from tests.models.tiny import make, prompts

ROOT = Path(__file__).parents[2]
HUB = ROOT / "hub"
README = (HUB / "README.md").read_text()
SETTINGS: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 6, "generator": 3}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the copy that transformers makes of generate.py out of the user's cache."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])  # transformers adds the cache to it
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("transformers_modules"):
            del sys.modules[name]


def from_hub(model: Any, **arguments: Any) -> Any:
    return model.generate(
        **prompts(model), custom_generate=str(HUB), trust_remote_code=True, **arguments
    )


@pytest.mark.parametrize("name", ["gpt2", "llama", "marian", "t5"])
@pytest.mark.parametrize("design", [None, "conditional-poisson"])
def test_the_folder_draws_what_the_package_draws(name: str, design: str | None) -> None:
    model = make(name)
    chosen = SETTINGS | {"temperature": 0.7, "return_dict_in_generate": True}
    chosen |= {"design": design} if design else {}
    direct = model.generate(**prompts(model), custom_generate=cpsbs.generate, **chosen)
    found = from_hub(model, **chosen)
    assert found.keys() == direct.keys()
    assert len(found.sequences) == 3 * 4
    for field in ("sequences", "log_probs", "sequences_scores", "log_inclusion", "log_weight"):
        assert torch.equal(found[field], direct[field]), field
    assert found.beams.settings == direct.beams.settings
    rows = [tuple(row) for row in found.beams.sequences[0].tolist()]
    assert len(set(rows)) == 4


def test_without_a_dictionary_sequences_come_back() -> None:
    model = make("gpt2")
    direct = model.generate(**prompts(model), custom_generate=cpsbs.generate, **SETTINGS)
    assert torch.equal(from_hub(model, **SETTINGS), direct)


def test_a_pinned_revision_says_how_to_load_and_not_how_to_decode() -> None:
    model = make("marian")
    pinned = from_hub(model, **SETTINGS, revision="0123abc", local_files_only=True)
    assert torch.equal(pinned, from_hub(model, **SETTINGS))


def test_nothing_runs_unless_the_code_is_trusted() -> None:
    model = make("gpt2")
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(
            **prompts(model), custom_generate=str(HUB), trust_remote_code=False, **SETTINGS
        )


def test_refusals_reach_the_caller() -> None:
    with pytest.raises(ValueError, match="length_penalty"):
        from_hub(make("t5"), **SETTINGS, length_penalty=2.0)


def test_a_missing_package_is_an_error_that_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = importlib.util.spec_from_file_location(
        "hub_generate", HUB / "custom_generate/generate.py"
    )
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setitem(sys.modules, "cpsbs", None)
    with pytest.raises(ImportError, match=r"pip install 'cpsbs\[transformers\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_transformers_names_what_is_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == "cpsbs":
            raise importlib.metadata.PackageNotFoundError(name)
        return "6.1" if name == "transformers" else installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ImportError, match=r"(?s)cpsbs.*None.*transformers<6.*6\.1"):
        from_hub(make("gpt2"), **SETTINGS)


def test_the_requirements_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["transformers"]]
    wanted = set()
    for requirement in declared:  # one bound on each line, which is all that transformers reads
        name = re.match(r"[\w-]+", requirement)
        assert name is not None
        wanted |= {name[0] + bound for bound in requirement.removeprefix(name[0]).split(",")}
    text = (HUB / "custom_generate/requirements.txt").read_text()
    lines = {line for line in text.splitlines() if not line.startswith("#")}
    own = {line for line in lines if line.startswith("cpsbs")}
    assert lines - own == wanted
    assert own == {"cpsbs>=0.2.0"}  # which has the arguments that the README describes


def test_the_card_has_the_metadata_of_the_convention() -> None:
    card: Any = ModelCard(README).data
    assert card.library_name == "transformers"
    assert "custom_generate" in card.tags
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert card.license == project["license"].lower()
    for design in re.findall(r'`"([\w-]+)"`', README):
        assert design in cpsbs.DESIGNS


def test_the_examples_of_the_card_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the local folder for the repository, and a tiny model for SmolLM2."""
    tokenizer = cpsbs.load("en-fr").tokenizer
    tokenizer.save_pretrained(tmp_path / "small")
    make("gpt2", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "small")
    there = {
        "ORG/cpsbs": str(HUB),
        "HuggingFaceTB/SmolLM2-135M-Instruct": str(tmp_path / "small"),
    }
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        for name, folder in there.items():
            block = block.replace(name, folder)
        exec(compile(block, "hub/README.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert len(set(printed[:5])) == 5
    assert "Le musée" in printed[0]
    assert [line[:11] for line in printed[-2:]] == ["E[Paris][0]", "E[Paris][1]"]
