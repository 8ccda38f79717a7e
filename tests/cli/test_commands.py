"""Commands as people give them, in processes of their own where that matters."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import cpsbs
from cpsbs.backends import Backend
from cpsbs.cli import batches as batching
from cpsbs.cli import estimate as estimating
from cpsbs.cli.batches import batches, default_batch_size, refill_size
from cpsbs.cli.commands import app
from cpsbs.designs import DEFAULT_DESIGN
from cpsbs.estimation import metrics
from cpsbs.experiments.plan import EXPERIMENTS
from cpsbs.text import demonstration

TEXT, REFERENCE = demonstration()[0]


def run(*arguments: str | Path, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


def records(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.split("\n") if line]


def test_sample_writes_an_object_a_source() -> None:
    result = run(
        "sample", TEXT, "The dog is red.", "-k", "3", "--seed", "5", "-r", REFERENCE, "-r", "x"
    )
    assert result.exit_code == 0, result.output
    first, second = records(result.stdout)
    assert (first["number"], first["text"]) == (0, TEXT)
    beams = cpsbs.load("en-fr").beams([TEXT, "The dog is red."], 3, seed=5)
    assert second["sequences"] == beams.tokens(1)
    assert second["log_prob"] == pytest.approx(beams.log_prob[1].tolist())
    assert len(set(map(tuple, first["sequences"]))) == 3
    assert first["bleu"][0] == cpsbs.sentence_bleu(first["texts"][0], REFERENCE)
    assert first["settings"]["design"].startswith(DEFAULT_DESIGN)


def test_sample_reads_files_and_standard_input(tmp_path: Path) -> None:
    text = "The dog is red.\r\nIt is\u2028one line.\n"
    (tmp_path / "in.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    from_file = run("sample", "-f", tmp_path / "in.txt", "-k", "2")
    from_pipe = run("sample", "-k", "2", stdin=text)
    assert from_file.exit_code == 0, from_file.output
    assert from_file.stdout == from_pipe.stdout
    assert [r["text"] for r in records(from_file.stdout)] == [
        "The dog is red.",
        "It is\u2028one line.",
    ]


def test_results_come_in_the_order_of_the_input() -> None:
    texts = [english for english, _ in demonstration()[:5]]
    result = run("sample", *texts, "-k", "2", "--batch-size", "2", "--max-length", "20")
    assert [r["text"] for r in records(result.stdout)] == texts


def test_causal_models_and_folders(causal: Path) -> None:
    result = run("sample", "the dog", "-m", causal, "-k", "4", "--max-length", "6")
    assert result.exit_code == 0, result.output
    assert len(records(result.stdout)[0]["texts"]) == 4


def test_anneal_towards_zero_is_beam_search() -> None:
    found = [
        records(run("sample", "The dog is red.", "-k", "3", *more).stdout)[0]["sequences"]
        for more in (["--design", "conditional-poisson", "--anneal", "0"], ["--design", "top-k"])
    ]
    assert sorted(found[0]) == sorted(found[1])


@pytest.mark.parametrize("estimator", ["unbiased", "normalized", "hindsight-normalized"])
def test_estimate_tells_value_error_and_signature(estimator: str) -> None:
    arguments = ["estimate", "bleu", TEXT, "-r", REFERENCE, "--temperature", "0.3", "-k", "4"]
    arguments += ["--design", "conditional-poisson", "--estimator", estimator]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    (record,) = records(result.stdout)
    assert 0 < record["value"] < 1.2
    assert record["line"].startswith("E[BLEU] = ")
    assert "temperature 0.3" in record["line"]
    assert (record["standard_error"] is None) == estimator.startswith("hindsight")


def test_estimates_of_repeats_are_of_independent_beams() -> None:
    arguments = ["estimate", "entropy", "The dog is red.", "-k", "3", "--temperature", "0.5"]
    one, several, plain = (
        records(run(*arguments, *more).stdout)[0]
        for more in ([], ["--repeats", "3"], ["--repeats", "3", "--plain"])
    )
    assert several["repeats"] == 3
    assert len(set(several["settings"]["seed"])) == 3
    assert one["settings"]["seed"] == several["settings"]["seed"][0] == 0
    assert plain["function"] == "entropy"
    assert one["interval_95"][0] < one["value"] < one["interval_95"][1]
    assert several["standard_error"] > 0


def test_hindsight_has_a_stream_for_every_batch() -> None:
    arguments = ["estimate", "length", "Yes.", "Yes.", "Yes.", "-k", "2", "--batch-size", "1"]
    arguments += ["--design", "conditional-poisson", "--estimator", "hindsight", "--runs", "1"]
    with pytest.MonkeyPatch.context() as patch:
        seeds = []

        def noted(*given: Any, generator: torch.Generator, **more: Any) -> Any:
            seeds.append(generator.initial_seed())
            return cpsbs.hindsight_inclusion(*given, generator=generator, **more)

        patch.setattr(estimating, "hindsight_inclusion", noted)
        found = records(run(*arguments).stdout)
    assert len(set(seeds)) == 3
    assert [record["runs"] for record in found] == [1, 1, 1]


def test_compare_lists_every_design() -> None:
    result = run("compare", "The dog is red.", "-k", "3", "--temperature", "0.5", "-r", "Le chien.")
    assert result.exit_code == 0, result.output
    found = {record["design"]: record for record in records(result.stdout)}
    assert list(found) == list(cpsbs.DESIGNS)
    assert found["top-k"]["shared"] == 3
    assert found["top-k"]["entropy"] is None
    assert found["stratified"]["entropy"]["value"] > 0
    captured = math.fsum(math.exp(x) for x in found["top-k"]["log_prob"])
    assert found["top-k"]["captured"] == pytest.approx(captured)
    assert found["independent"]["captured"] <= 1


def test_designs_models_version_and_help() -> None:
    designs, models = run("designs"), run("models")
    assert all(name in designs.stdout for name in cpsbs.DESIGNS)
    assert "en-fr" in models.stdout
    assert "French" in models.stdout
    assert run("--version").stdout.strip() == cpsbs.__version__
    for command in ("sample", "estimate", "compare", "demo"):
        assert "Exit status" in run(command, "--help").stdout


def test_demo_shows_the_main_job() -> None:
    result = run("demo", "-k", "4")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("E[BLEU] = ") == 2
    assert TEXT in result.stdout


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["sample"], "", "the input is empty"),
        (["sample"], "Yes.\n\nNo.\n", "text 2 is empty"),
        (["sample"], "word " * 300 + "\n", "takes at most 256"),
        (["sample"], b"Yes.\n\xff\n", "line 2 has the byte 0xff"),
        (["sample", "Yes.", "--file", "x"], None, "give one of them"),
        (["sample", "--file", "nowhere"], None, "nowhere, which cannot be read: No such file"),
        (["sample", "Yes.", "--design", "nope"], None, "conditional-poisson, "),
        (["sample", "Yes.", "--design", "top-k", "--anneal", "0.5"], None, "--anneal"),
        (["sample", "Yes.", "--temperature", "0"], None, "error: --temperature is 0"),
        (["sample", "Yes.", "--dtype", "float9"], None, "error: --dtype is float9; allowed are"),
        (["sample", "Yes.", "--int8", "--dtype", "float64"], None, "error: --int8 is 'int8', but"),
        (
            ["sample", "Yes.", "--model", "./nowhere"],
            None,
            "error: --model is './nowhere', but this folder does not exist",
        ),
        (["sample", "Yes.", "--output", "no/folder/x.jsonl"], None, "there is no folder"),
        (["estimate", "bleu", "Yes."], None, "bleu needs a reference"),
        (["estimate", "bleu", "Yes.", "-r", "a", "-r", "b"], None, "2 references for 1 texts"),
        (["estimate", "length", "Yes.", "--design", "top-k"], None, "cannot estimate"),
        (["estimate", "length", "Yes.", "--estimator", "hindsight"], None, "conditional-poisson"),
        (["compare", " "], None, "text 1 is empty; nothing was computed. Give another text\n"),
        (
            ["sample", "Yes.", "--max-length", "999"],
            None,
            "--max-length is 999; en-fr takes at most",
        ),
        (["sample", "--skip"], "\n\n", "text 1 is empty"),
        (["estimate", "length", "Yes.", "--plain"], None, "--plain applies to entropy only"),
        (["estimate", "bleu", "Yes.", "--reference-file", "no"], None, "--reference-file is no"),
        (["demo", "99"], None, "number is 99; it must be from 1 to 30"),
    ],
)
def test_errors_are_one_line(arguments: list[str], stdin: str | bytes | None, message: str) -> None:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not result.stdout


@pytest.mark.parametrize(
    "error",
    [MemoryError("std::bad_alloc"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
)
def test_too_little_memory_is_told_with_what_to_do(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(cpsbs.TextModel, "draw", fail)
    result = run("sample", "Yes.")
    assert result.exit_code == 1
    assert "too little memory; choose a smaller -k or --batch-size" in result.stderr


def test_wrong_options_exit_with_two() -> None:
    assert run("sample", "Yes.", "-k", "0").exit_code == 2
    assert run("sample", "Yes.", "--nonsense").exit_code == 2


def test_bad_lines_are_left_out_on_request() -> None:
    result = run("sample", "--skip", "-k", "2", stdin="Yes.\n\nNo.\n")
    assert result.exit_code == 3
    assert [r["number"] for r in records(result.stdout)] == [0, 2]
    assert "1 of 3 lines were skipped; line 2 is empty" in result.stderr


@pytest.mark.parametrize("package", ["transformers", "sacrebleu", "pyarrow"])
def test_a_missing_package_is_told_with_its_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {"sacrebleu": "metrics", "pyarrow": "parquet"}.get(package, package)
    monkeypatch.setitem(sys.modules, package, None)
    metrics._bleu.cache_clear()  # it keeps sacrebleu
    result = run("sample", "Yes.", "-k", "1", "-r", "Oui.", "-o", tmp_path / "x.parquet")
    assert result.exit_code == 1
    assert f"{package} is not installed" in result.stderr
    assert f"pip install 'cpsbs[{extra}]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_package_is_imported_without_extras() -> None:
    """In a process where they are missing; the command line says how to get it."""
    missing = ["typer", "rich", "transformers", "sacrebleu", "pyarrow", "matplotlib", "ray", "gguf"]
    code = f"import sys; sys.modules |= dict.fromkeys({missing}); import cpsbs\n"
    code += "from cpsbs.__main__ import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("error: typer is not installed")
    assert "pip install 'cpsbs[cli]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_only_reproduce_imports_the_experiments() -> None:
    """In a process of its own, since other tests import them."""
    code = "import sys, cpsbs.cli.commands\n"
    code += "sys.exit(any(name.startswith('cpsbs.experiments') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_help_names_every_experiment() -> None:
    shown = run("reproduce", "--help").stdout
    assert all(name in shown for name in EXPERIMENTS)
    assert "--plot-only" in shown
    assert "--draw-only" not in shown


def test_batches_that_are_refilled() -> None:
    """The longest first, then so many as take the places of others; what is done is left out."""
    lengths = dict(enumerate([5, 9, 7, 3, 8, 1, 6]))
    assert list(batches(lengths, range(7), 4, 2)) == [[1, 4, 2, 6], [0, 3], [5]]
    assert list(batches(lengths, range(7), 4, 4)) == [[1, 4, 2, 6], [0, 3, 5]]
    assert [refill_size(size) for size in (1, 32, 255, 256, 1024)] == [1, 32, 255, 128, 512]


def test_a_gpu_gets_more_texts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fit, by the prediction for the longest text that the model takes."""
    asked: list[tuple[int, int, int]] = []

    class Card(Backend):
        def sources_that_fit(self, model: Any, k: int, prompt: int, steps: int) -> int:
            asked.append((k, prompt, steps))
            return 300

    model = cpsbs.load("en-fr", device="cpu")
    assert [default_batch_size(model, k, 9) for k in (5, 20, 2000)] == [64, 16, 1]
    on_card: Any = SimpleNamespace(
        model=SimpleNamespace(device=torch.device("cuda")), room=lambda _: 60
    )
    monkeypatch.setattr(batching, "backend_for", lambda _: Card())
    sizes = [default_batch_size(on_card, k, 9) for k in (1, 20, 40, 10_000)]
    assert sizes == [300, 256, 128, 1]
    assert asked == [(k, 60, 9) for k in (1, 20, 40, 10_000)]
