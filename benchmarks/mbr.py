"""Minimum Bayes risk decoding at equal cost: which candidates, and whose evidence?

    python -m benchmarks.mbr decide --model FOLDER --source FILE --folder FOLDER [--rows …]
    python -m benchmarks.mbr score --reference FILE --folder FOLDER --json FILE [--pages FILE …]

``decide`` writes what each row of the table chooses for a test set; a row that is there already is
not computed again, so that several processes can share the work. ``score`` compares the choices
with the references: corpus chrF and BLEU by sacrebleu, and their differences from beam search and
from the row that is the default, with 95% intervals of a paired bootstrap over sentences. Rows that
are in the JSON file already, and not in the folder, stay there.

A size is a number of sequences drawn for a sentence, whatever their roles, so that rows of a size
cost the same. Rows that draw by temperature name it.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import cpsbs
from benchmarks.tables import into_readme, table
from benchmarks.timing import machine
from cpsbs.decisions.plan import Plan
from cpsbs.designs import design_named
from cpsbs.search.settings import SearchSettings

RESAMPLES = 1000
ROWS = 4096
"""The number of sequences that are drawn at once."""
EPSILON = 0.02
MASKED = ("input_ids", "attention_mask")
BASELINE, DEFAULT = "beam search", "¼ beam + stratified 0.7"


@dataclass(frozen=True)
class Row:
    """A way to decide, at any size."""

    candidates: Callable[[int], str]
    """The candidates of a plan for a size; empty for the most probable sequence of beam search."""
    evidence: Callable[[int], int] = lambda size: size
    design: str = "stratified"
    temperature: float = 1.0
    epsilon: float = 0.0
    confidence: float | None = None


def rows() -> dict[str, Row]:
    """All rows of the table by name."""
    found = {BASELINE: Row(lambda n: "")}
    for t in (0.3, 0.5, 0.7, 1.0):
        found[f"independent {t}"] = Row(lambda n: "evidence", design="independent", temperature=t)
    found["independent ε 0.02"] = Row(lambda n: "evidence", design="independent", epsilon=EPSILON)
    for t in (0.5, 0.7):
        found[f"arithmetic {t}"] = Row(lambda n: "evidence", design="arithmetic", temperature=t)
        found[f"SBS {t}"] = Row(lambda n: "evidence", design="gumbel-top-k", temperature=t)
    found["beam search, p-weighted"] = Row(lambda n: "evidence", design="top-k")
    for t in (0.3, 0.5, 0.7, 1.0):
        found[f"stratified {t}"] = Row(lambda n: "evidence", temperature=t)
    for t in (0.3, 0.5, 0.7, 1.0):
        found[f"beam + stratified {t}"] = Row(
            lambda n: f"beam:{n // 2}+evidence", lambda n: n - n // 2, temperature=t
        )
        found[f"¼ beam + stratified {t}"] = Row(
            lambda n: f"beam:{max(1, n // 4)}+evidence",
            lambda n: n - max(1, n // 4),
            temperature=t,
        )
    found["¼ beam + independent 0.7"] = Row(
        lambda n: f"beam:{n // 4}+evidence",
        lambda n: n - n // 4,
        design="independent",
        temperature=0.7,
    )
    found["adaptive 0.7"] = Row(
        lambda n: f"beam:{n // 4}+evidence", lambda n: n // 4, temperature=0.7, confidence=0.95
    )
    return found


class Translator:
    """Draws for the sentences of a test set, and remembers texts."""

    def __init__(self, model: cpsbs.TextModel, sources: list[str], max_length: int = 128) -> None:
        self.model, self.sources, self.max_length = model, sources, max_length
        self._texts: dict[tuple[int, ...], str] = {}

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return texts; each sequence is decoded once."""
        keys = [tuple(y) for y in sequences]
        new = [y for y in dict.fromkeys(keys) if y not in self._texts]
        self._texts.update(zip(new, self.model.decode([list(y) for y in new]), strict=True))
        return [self._texts[y] for y in keys]

    def draw(
        self, numbers: list[int], settings: SearchSettings, seed_offset: int, epsilon: float = 0.0
    ) -> cpsbs.Beams:
        """Draw a beam for each of the sentences."""
        texts = [self.sources[i] for i in numbers]
        if not epsilon:
            return next(self.model.draw([texts], settings, seed=1 + seed_offset, streams=[numbers]))
        from transformers import EpsilonLogitsWarper

        inputs = self.model.tokenizer(texts, return_tensors="pt", padding=True)
        model = cpsbs.TransformersModel(
            self.model.model,
            logits_processor=[EpsilonLogitsWarper(epsilon)],
            **{name: inputs[name].to(self.model.model.device) for name in MASKED},
        )
        return cpsbs.search(
            model, settings.k, settings.design, max_length=settings.max_length, generator=1
        )


def decided(translator: Translator, row: Row, size: int) -> Iterator[tuple[int, str, int]]:
    """Yield the number of each sentence, what is chosen for it, and how many sequences it cost."""
    sources = translator.sources
    order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
    batch = max(1, min(512, ROWS // size))
    for begin in range(0, len(order), batch):
        numbers = order[begin : begin + batch]
        if row.design == "top-k" or not row.candidates(size):
            settings = SearchSettings(size, design_named("top-k"), translator.max_length)
            beams = translator.draw(numbers, settings, 0)
            if not row.candidates(size):
                texts = [own[0] for own in beams.to("cpu").decode(translator.decode)]
            else:
                texts = cpsbs.mbr(beams, decode=translator.decode, weights="probability").texts
            yield from ((i, text, size) for i, text in zip(numbers, texts, strict=True))
            continue
        plan = Plan.parse(
            row.candidates(size),
            row.evidence(size),
            design=row.design,
            confidence=row.confidence,
            rounds=4,
        )
        settings = plan.evidence_settings(translator.max_length, row.temperature)
        drawn = [
            translator.draw(
                numbers,
                settings if part is None else part.settings(settings),
                offset,
                0.0 if part else row.epsilon,
            )
            for offset, part in plan.searches
        ]
        found = plan.decide(drawn, numbers, translator.draw, settings, "chrf", translator.decode)
        drawn_before = sum(part.size for part in plan.parts)
        for i, own in zip(numbers, found, strict=True):
            yield i, own.text, drawn_before + plan.k * own.rounds


def decide(arguments: argparse.Namespace) -> None:
    """Write the choices of every row and size that is not there yet."""
    sources = arguments.source.read_text(encoding="utf-8").splitlines()[: arguments.limit]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for size in arguments.sizes:
        for name in arguments.rows or rows():
            file = arguments.folder / f"{name.replace(' ', '_')}.{size}.json"
            if file.exists():
                continue
            # A fresh model, because recorded steps keep the memory of all shapes before.
            model = cpsbs.load(str(arguments.model), device=arguments.device)
            translator = Translator(model, sources)
            begin = time.perf_counter()
            found = sorted(decided(translator, rows()[name], size))
            result = {
                "row": name,
                "size": size,
                "seconds": time.perf_counter() - begin,
                "cost": sum(cost for _, _, cost in found) / len(found),
                "texts": [text for _, text, _ in found],
            }
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(result, ensure_ascii=False), encoding="utf-8")
            partial.replace(file)
            print(name, size, f"{result['seconds']:.1f} s", flush=True)
            del model, translator
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


@cache
def metric(name: str) -> Any:
    """Return sacrebleu's corpus metric of a name."""
    from sacrebleu import metrics

    return getattr(metrics, name.upper())()


def statistics(texts: list[str], references: list[str]) -> dict[str, torch.Tensor]:
    """The counts that sacrebleu's corpus scores of any subset of sentences rest on."""
    found = {}
    for name in ("chrF", "BLEU"):
        counts = metric(name)._extract_corpus_statistics(texts, [references])
        found[name] = torch.tensor(counts, dtype=torch.float64)
    return found


def corpus_score(name: str, counts: torch.Tensor) -> float:
    """Return sacrebleu's score of sums of counts."""
    return float(metric(name)._compute_score_from_stats([int(c) for c in counts.tolist()]).score)


def score(arguments: argparse.Namespace) -> None:
    """Compare all choices with the references, and print the table."""
    references = arguments.reference.read_text(encoding="utf-8").splitlines()[: arguments.limit]
    choices = [json.loads(f.read_text(encoding="utf-8")) for f in arguments.folder.glob("*.json")]
    order = {name: i for i, name in enumerate(rows())}
    choices.sort(key=lambda c: (c["size"], order[c["row"]]))
    counts = {(c["row"], c["size"]): statistics(c["texts"], references) for c in choices}
    generator = torch.Generator().manual_seed(0)
    n = len(references)
    drawn = torch.randint(n, (RESAMPLES, n), generator=generator)
    weight = torch.zeros((RESAMPLES, n), dtype=torch.float64)
    weight.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    resampled = {
        key: {m: [corpus_score(m, row) for row in weight @ own] for m, own in both.items()}
        for key, both in counts.items()
    }
    found = []
    for choice in choices:
        key = (choice["row"], choice["size"])
        row: dict[str, Any] = {k: v for k, v in choice.items() if k != "texts"}
        for m, own in counts[key].items():
            row[m] = corpus_score(m, own.sum(0))
            for other, label in ((BASELINE, "beam"), (DEFAULT, "default")):
                against = (other, choice["size"])
                if against in counts:
                    differences = torch.tensor(resampled[key][m]) - torch.tensor(
                        resampled[against][m]
                    )
                    ends = differences.double().quantile(torch.tensor([0.025, 0.975]).double())
                    row[f"{m} − {label}"] = [
                        row[m] - corpus_score(m, counts[against][m].sum(0)),
                        *ends.tolist(),
                    ]
        found.append(row)
    kept: list[dict[str, Any]] = []
    if arguments.json.exists():
        before = json.loads(arguments.json.read_text())["rows"]
        kept = [row for row in before if (row["row"], row["size"]) not in counts]
    found = sorted(found + kept, key=lambda row: (row["size"], order[row["row"]]))
    results = {"machine": machine(), "sentences": n, "rows": found}
    arguments.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    report(arguments, results)


def tables(results: dict[str, Any], name: str) -> dict[str, list[dict[str, object]]]:
    """A row for each way to decide: chrF and BLEU for every size."""
    sizes = sorted({row["size"] for row in results["rows"]})
    order = {name: i for i, name in enumerate(rows())}  # rows of earlier scripts come last
    ways = dict.fromkeys(r["row"] for r in results["rows"])
    known = {(row["row"], row["size"]): row for row in results["rows"]}
    lines: list[dict[str, object]] = []
    for way in sorted(ways, key=lambda way: order.get(way, len(order))):
        line: dict[str, object] = {"": way}
        for size in sizes:
            row = known.get((way, size))
            line[str(size)] = "" if row is None else f"{row['chrF']:.2f} / {row['BLEU']:.2f}"
        lines.append(line)
    intervals = []
    for (way, size), row in known.items():
        if way == DEFAULT and "chrF − beam" in row:
            intervals.append(
                {
                    "sequences": size,
                    **{
                        f"{m} − beam search": _interval(row[f"{m} − beam"])
                        for m in ("chrF", "BLEU")
                    },
                }
            )
    return {f"mbr_{name}": lines, f"mbr_{name}_gain": intervals}


def _interval(ends: list[float]) -> str:
    value, low, high = ends
    return f"{value:+.2f} ({low:+.2f} to {high:+.2f})"


def report(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """Print the tables, and put them into pages."""
    found = tables(results, arguments.name)
    for name, lines in found.items():
        if lines:
            print(f"\n{name}\n\n{table(lines)}")
    for page in arguments.pages:
        page.write_text(into_readme(page.read_text(), found))


def main() -> None:
    """Decide or score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["decide", "score", "tables"])
    parser.add_argument("--model", type=Path, default=Path("en-fr"))
    parser.add_argument("--source", type=Path)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pages", type=Path, nargs="*", default=[], help="with tables to fill in")
    parser.add_argument("--name", default="newstest2014", help="of the test set, in tables")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--rows", nargs="+", choices=list(rows()))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--device")
    arguments = parser.parse_args()
    if arguments.task == "tables":
        report(arguments, json.loads(arguments.json.read_text()))
    else:
        {"decide": decide, "score": score}[arguments.task](arguments)


if __name__ == "__main__":
    main()
