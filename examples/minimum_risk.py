"""Minimum-risk training of the embedded translation model: expected BLEU by policy gradients.

    python -m examples.minimum_risk --train pairs.tsv.xz --dev EN FR --test EN FR \
        --method stratified --json stratified.json

The model is trained to make E[BLEU of y against the reference] large, under its own distribution at
a temperature, from K sequences for each sentence. Methods differ in how these are drawn and in
their baseline; everything else is the same. The weights are averaged over the last steps. While it
trains, it reports BLEU and chrF of beam search with these on a development set, and how much the
gradient of a fixed batch varies from draw to draw at the latest weights: its standard deviation, as
a Euclidean norm. ``benchmarks.minimum_risk`` compares the methods.

One GPU takes some minutes; a CPU is enough to try it with ``--steps 2 --batch 4``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cpsbs
from cpsbs import Beams, TextModel
from cpsbs.estimation.weights import WeightWarning
from cpsbs.utilities import Bleu
from training.text import cleaned, is_translation, read_pairs

Pair = tuple[str, str]
"""A sentence and its reference translation."""

MAX_LENGTH = 64
WARMUP = 20
AVERAGING = 0.98
"""What remains in the average of the weights after a step, of what was in it before."""


@dataclass(frozen=True)
class Method:
    """How sequences are drawn, and what their rewards are compared with."""

    design: str
    baseline: str = "auto"
    beams: int = 1
    """Into how many independent beams the K sequences are divided."""
    normalize: bool = False


METHODS = {
    "RLOO": Method("independent", "loo"),
    "SBS": Method("gumbel-top-k", "loo"),
    "CPSBS": Method("conditional-poisson", normalize=True),
    "stratified": Method("stratified", "own"),
    "stratified, cross": Method("stratified", "cross", beams=2),
}


class MinimumRisk:
    """Trains a model on pairs by one method.

    Args:
        model: the model, in float32.
        method: how to draw.
        k: K, the number of sequences for each sentence.
        temperature: the temperature of the distribution whose expected BLEU is raised.
        rate: the largest learning rate of Adam; it rises for ``WARMUP`` steps, then falls to zero.
        steps: the number of steps.
    """

    def __init__(
        self,
        model: TextModel,
        method: Method,
        k: int = 8,
        temperature: float = 0.5,
        rate: float = 2e-5,
        steps: int = 150,
    ) -> None:
        self.model, self.method, self.k, self.temperature = model, method, k, temperature
        model.model.requires_grad_(True)
        self.parameters = list(model.model.parameters())
        self._adam = torch.optim.Adam(self.parameters, lr=rate, betas=(0.9, 0.98))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._adam, lambda step: min((step + 1) / WARMUP, 1.0, (steps - step) / max(1, steps))
        )
        self._average = [p.detach().clone() for p in self.parameters]

    def rewards(self, beams: Beams, pairs: Sequence[Pair]) -> Tensor:
        """Return [B, K] sentence BLEU of every sequence, 0 in empty places."""
        texts = self.model.texts(beams.to("cpu"))
        tables = Bleu().tables(texts, [[french] for _, french in pairs], torch.device("cpu"))
        found = torch.zeros(beams.log_prob.shape, dtype=torch.float64)
        for b, table in enumerate(tables):
            found[b, beams.present[b].cpu()] = table[:, 0]
        return found.to(beams.log_prob.device)

    def expected_reward(self, pairs: Sequence[Pair], seed: int) -> Tensor:
        """Return an estimate of the mean expected BLEU, with its gradient."""
        texts, method = [english for english, _ in pairs], self.method
        several = [
            self.model.beams(
                texts,
                self.k // method.beams,
                method.design,
                temperature=self.temperature,
                max_length=MAX_LENGTH,
                seed=seed * method.beams + i,
            )
            for i in range(method.beams)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WeightWarning)  # what CPSBS gives is part of the story
            return cpsbs.risk(
                several,
                [self.rewards(beams, pairs) for beams in several],
                [cpsbs.log_prob(self.model.sequence_model(texts), beams) for beams in several],
                method.baseline,
                normalize=method.normalize,
            ).mean()

    def step(self, pairs: Sequence[Pair], seed: int) -> float:
        """Take one step, and return the estimate of the expected BLEU before it."""
        self._adam.zero_grad()
        reward = self.expected_reward(pairs, seed)
        (-reward).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self._adam.step()
        self._schedule.step()
        for mean, p in zip(self._average, self.parameters, strict=True):
            mean.lerp_(p.detach(), 1 - AVERAGING)
        return float(reward.detach())

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averages of the weights over the last steps in the place of the weights."""
        with torch.no_grad():
            latest = [p.clone() for p in self.parameters]
            for p, mean in zip(self.parameters, self._average, strict=True):
                p.copy_(mean)  # in place, so that recorded steps of the search see it
            try:
                yield
            finally:
                for p, own in zip(self.parameters, latest, strict=True):
                    p.copy_(own)

    def gradient_spread(self, pairs: Sequence[Pair], draws: int) -> tuple[float, float]:
        """Return the norm of the mean gradient over several draws, and its standard deviation."""
        square, total = 0.0, torch.zeros(())
        for seed in range(draws):
            gradient = self._gradient(pairs, 10**6 + seed)
            square += float(gradient.double().square().sum())
            total = total.to(gradient) + gradient
        mean = float(total.double().square().sum()) / draws**2
        return math.sqrt(mean), math.sqrt(max(0.0, square / draws - mean) * draws / (draws - 1))

    def _gradient(self, pairs: Sequence[Pair], seed: int) -> Tensor:
        """Return the gradient of all parameters, as one vector."""
        found = torch.autograd.grad(
            self.expected_reward(pairs, seed), self.parameters, allow_unused=True
        )
        return torch.cat([g.flatten() for g in found if g is not None])


def corpus_scores(model: TextModel, sources: list[str], references: list[str]) -> dict[str, float]:
    """Return BLEU and chrF of beam search with five hypotheses."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
    found = [""] * len(sources)
    for begin in range(0, len(order), 500):
        rows = order[begin : begin + 500]
        beams = model.beams([sources[i] for i in rows], 5, "top-k", max_length=128).to("cpu")
        for i, texts in zip(rows, model.texts(beams), strict=True):
            found[i] = texts[0]
    scores = (metric.corpus_score(found, [references]) for metric in (BLEU(), CHRF()))
    return {score.name: score.score for score in scores}


def read_lines(file: Path, limit: int | None) -> list[str]:
    """Return the lines of a file."""
    return file.read_text(encoding="utf-8").splitlines()[:limit]


def training_pairs(file: Path, model: TextModel) -> list[Pair]:
    """Return pairs of moderate length from a file of tab-separated lines, compressed by xz."""
    normalize = model.tokenizer.backend_tokenizer.normalizer.normalize_str
    found = (cleaned(pair, normalize) for pair in read_pairs(file))
    return [p for p in found if is_translation(p) and 5 <= len(p[0].split()) <= 35]


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train by one method, and return what was seen on the way."""
    torch.set_float32_matmul_precision("high")
    model = cpsbs.load("en-fr", device=arguments.device, dtype="float32")
    learner = MinimumRisk(
        model,
        METHODS[arguments.method],
        arguments.k,
        arguments.temperature,
        arguments.rate,
        arguments.steps,
    )
    pairs = training_pairs(arguments.train, model)
    dev, test = (
        [read_lines(file, arguments.limit) for file in files]
        for files in (arguments.dev, arguments.test)
    )
    order = random.Random(arguments.seed)
    order.shuffle(pairs)
    held_out, pairs = pairs[: arguments.batch], pairs[arguments.batch :]
    history: list[dict[str, Any]] = []
    begin, searched = time.perf_counter(), 0.0
    for step in range(arguments.steps + 1):
        if step % arguments.every == 0 or step == arguments.steps:
            aside = time.perf_counter()
            with learner.averaged():
                row: dict[str, Any] = {"step": step, **corpus_scores(model, *dev)}
            if arguments.draws > 1:
                norm, spread = learner.gradient_spread(held_out, arguments.draws)
                row |= {"gradient": norm, "spread": spread}
            searched += time.perf_counter() - aside
            history.append(row)
            print(arguments.method, arguments.seed, row, flush=True)
        if step < arguments.steps:
            first = step * arguments.batch
            batch = [pairs[(first + i) % len(pairs)] for i in range(arguments.batch)]
            reward = learner.step(batch, seed=arguments.seed * 10**6 + step)
            history[-1].setdefault("rewards", []).append(reward)
    seconds = time.perf_counter() - begin - searched
    with learner.averaged():
        final = corpus_scores(model, *test)
        if arguments.save is not None:
            model.model.save_pretrained(arguments.save)
    settings = ("method", "k", "temperature", "rate", "batch", "steps", "seed")
    return {
        **{name: getattr(arguments, name) for name in settings},
        "history": history,
        "test": final,
        "seconds_a_step": seconds / max(1, arguments.steps),
    }


def main() -> None:
    """Train, and write down what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train", type=Path, required=True, help="English TAB French, xz")
    parser.add_argument("--dev", type=Path, nargs=2, required=True, help="source and reference")
    parser.add_argument("--test", type=Path, nargs=2, required=True, help="source and reference")
    parser.add_argument("--limit", type=int, help="lines of development and test sets to use")
    parser.add_argument("--method", choices=list(METHODS), default="stratified")
    parser.add_argument("--k", type=int, default=8, help="sequences for each sentence")
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--rate", type=float, default=2e-5)
    parser.add_argument("--batch", type=int, default=128, help="sentences in a step")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--draws", type=int, default=8, help="to measure the gradient's spread")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", type=Path, help="folder for the trained model")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    results = train(arguments)
    print(json.dumps({"method": results["method"], "test": results["test"]}))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
