"""Checks an installed cpsbs from outside, with nothing but the standard library.

    python -I smoke.py core    # in an environment without extras
    python -I smoke.py cli     # in an environment with the extra cli

``install.py`` runs it in fresh environments. Each check prints a line; the first that fails ends
the program with a traceback.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

EXTRAS = {
    "transformers": "transformers",
    "metrics": "sacrebleu",
    "cli": "typer",
    "explore": "starlette",
    "gguf": "gguf",
    "meaning": "wordllama",
    "pandas": "pandas",
    "parquet": "pyarrow",
    "plots": "matplotlib",
    "ray": "ray",
    "trl": "trl",
    "zst": "zstandard",
}
"""A package of every extra."""


def cpsbs_command(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the command that the package installs beside Python."""
    program = str(Path(sys.executable).parent / "cpsbs")
    return subprocess.run(
        [program, *arguments], capture_output=True, encoding="utf-8", timeout=timeout
    )


def says_how(function: Callable[[], object], extra: str) -> None:
    """Check that a function fails for want of an extra and that the error tells how to get it."""
    try:
        function()
        told = "no error"
    except ImportError as error:
        told = str(error)
    assert f"pip install 'cpsbs[{extra}]'" in told, f"without the extra {extra}: {told}"


def import_is_complete() -> None:
    """Check that every public name is there, from the installed wheel."""
    import cpsbs

    assert cpsbs.__version__ == version("cpsbs")
    assert Path(cpsbs.__file__).is_relative_to(sys.prefix), cpsbs.__file__
    for name in set(cpsbs.__all__) - {"generate"}:  # which needs transformers
        assert hasattr(cpsbs, name), name


def search_is_exact_on_a_table() -> None:
    """Check a search and an estimate on a model with seven sequences."""
    import cpsbs

    model = cpsbs.TableModel({(): [0.5, 0.3, 0.2], (1,): [0.9, 0.1, 0], (2,): [0.2, 0.2, 0.6]}, 0)
    exact = sum(p * len(y) for y, p in model.sequences(2).items())
    for design in cpsbs.DESIGNS:
        beams = cpsbs.search(model, 3, design, max_length=2, generator=0)
        assert beams.present.any(), design
    beams = cpsbs.search(model, 10, max_length=2, generator=0)
    found = cpsbs.estimate(beams, len)
    assert abs(float(found.value[0]) - exact) < 1e-9
    assert "exactly" in str(found)


def extras_are_absent() -> None:
    """Check that the environment has no extra, so that their errors can be seen."""
    for extra, package in EXTRAS.items():
        assert find_spec(package) is None, f"{package} of the extra {extra} is installed"


def missing_extras_are_named() -> None:
    """Check the errors of everything in the library that needs an extra."""
    import cpsbs.trl
    from cpsbs.experiments.figures import image
    from cpsbs.experiments.store import Store
    from cpsbs.workers.cluster import connect

    beams = cpsbs.search(cpsbs.TableModel.random(3, 2), 2, max_length=2, generator=0)
    with tempfile.TemporaryDirectory() as folder:
        needs: dict[str, Callable[[], object]] = {
            "transformers": lambda: cpsbs.load("en-fr"),
            "meaning": cpsbs.keys.word_embeddings,
            "metrics": lambda: cpsbs.sentence_bleu("a text", "a text"),
            "pandas": beams.to_pandas,
            "parquet": lambda: Store(Path(folder)),
            "plots": lambda: image(None, "svg"),
            "ray": lambda: connect(None),
            "trl": lambda: cpsbs.trl.WeightedGRPOTrainer,
        }
        for extra, function in needs.items():
            says_how(function, extra)
    says_how(lambda: cpsbs.generate, "transformers")


def command_says_what_it_needs() -> None:
    """Check that the command without its extra ends with an error and exit status 1."""
    done = cpsbs_command("demo")
    assert done.returncode == 1, done
    assert not done.stdout, done.stdout
    *before, line = done.stderr.splitlines()  # torch may warn that there is no numpy
    assert line.startswith("error: "), line
    assert "pip install 'cpsbs[cli]'" in line, line
    assert "Traceback" not in "".join(before), done.stderr


def demonstration_runs() -> None:
    """Check ``cpsbs demo``, which needs the embedded model and sacrebleu."""
    done = cpsbs_command("demo")
    assert done.returncode == 0, done
    assert "vélo" in done.stdout, done.stdout
    assert "E[BLEU]" in done.stdout, done.stdout


def further_extras_are_named() -> None:
    """Check what needs more than the extra cli."""
    import cpsbs

    says_how(lambda: cpsbs.load("folder", gguf_file="model.gguf"), "gguf")
    wanted = {"parquet": "out.parquet"}
    if sys.version_info < (3, 14):  # which has a module of its own
        wanted["zst"] = "out.jsonl.zst"
    for extra, name in wanted.items():
        with tempfile.TemporaryDirectory() as folder:
            done = cpsbs_command("sample", "Hello.", "-k", "2", "--output", f"{folder}/{name}")
        assert done.returncode == 1, done
        assert f"pip install 'cpsbs[{extra}]'" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr, done.stderr


CHECKS = {
    "core": (
        import_is_complete,
        search_is_exact_on_a_table,
        extras_are_absent,
        missing_extras_are_named,
        command_says_what_it_needs,
    ),
    "cli": (
        import_is_complete,
        search_is_exact_on_a_table,
        demonstration_runs,
        further_extras_are_named,
    ),
}


def main() -> None:
    """Run the checks of one kind of environment."""
    for check in CHECKS[sys.argv[1]]:
        check()
        sys.stdout.write(f"  {check.__name__.replace('_', ' ')}\n")


if __name__ == "__main__":
    main()
