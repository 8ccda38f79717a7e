"""The training code on a corpus made here: two languages of ten words."""

from __future__ import annotations

import json
import lzma
import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from training import prepare, train
from training.batches import Parallel, Shape, Side, Words
from training.packed_marian import EAGER, loss, marian
from training.text import cleaned, is_translation, read_pairs, without_repeats
from training.tokenizer import Segmentations, untrained

ENGLISH = ["the", "house", "sees", "a", "red", "dog", "and", "don't", "eat", "12", "apples"]
FRENCH = ["la", "maison", "voit", "un", "rouge", "chien", "et", "n'est", "mange", "12", "pommes"]
SHAPE = Shape(source=256, target=256, sentences=32)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    rng = random.Random(0)
    with lzma.open(folder / "text.tsv.xz", "wt", encoding="utf-8") as out:
        for _ in range(300):
            words = [rng.randrange(len(ENGLISH)) for _ in range(rng.randrange(3, 12))]
            sides = (" ".join(language[w] for w in words) for language in (ENGLISH, FRENCH))
            out.write("\t".join(sides) + "\n")
    arguments = ["prepare", "--out", str(folder), "--vocabulary", "80", str(folder / "text.tsv.xz")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        prepare.main()
    return folder


def texts(folder: Path) -> tuple[list[str], list[str]]:
    pairs = filter(is_translation, without_repeats(read_pairs(folder / "text.tsv.xz")))
    english, french = zip(*pairs, strict=True)
    return list(english), list(french)


def test_words_segmented_one_by_one_give_what_the_tokenizer_gives(prepared: Path) -> None:
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    with np.load(prepared / "segmentations.npz") as stored:
        ways = Segmentations(**stored)
    generator = torch.Generator().manual_seed(0)
    for name, side in zip(prepare.SIDES, texts(prepared), strict=True):
        words = Words(prepare.read_array(prepared / f"{name}.npy.xz"), ways, torch.device("cpu"))
        usual = words.segmented(False, generator)
        dropped = words.segmented(True, generator)
        other = 0
        for i, text in enumerate(side):
            expected = tokenizer.encode(text).ids
            begin, end = int(usual.start[i]), int(usual.start[i] + usual.length[i])
            assert usual.tokens[begin:end].tolist() == expected
            begin, end = int(dropped.start[i]), int(dropped.start[i] + dropped.length[i])
            random_way = dropped.tokens[begin:end].tolist()
            other += random_way != expected
            assert tokenizer.decode(random_way) == tokenizer.decode(expected)
        assert other > len(side) / 4


def test_packed_model_computes_what_marian_computes() -> None:
    torch.manual_seed(0)
    model = marian(50, layers=(2, 2), width=64).eval()
    rng = random.Random(1)
    sources = [[rng.randrange(3, 50) for _ in range(n)] + [1] for n in (3, 9, 1, 6)]
    targets = [[rng.randrange(3, 50) for _ in range(n)] + [1] for n in (5, 2, 8, 1)]
    cpu = torch.device("cpu")
    text = Parallel(Side.of(sources, cpu), Side.of(targets, cpu), Shape(64, 300, 8))
    (sentences,) = text.batches([0])
    assert sorted(sentences) == [0, 1, 2, 3]
    ours = loss(model, text.batch(sentences), 0.0, EAGER).detach()
    total = 0.0
    for source, target in zip(sources, targets, strict=True):
        # One sentence at a time, so that nothing is padded.
        out = model(
            input_ids=torch.tensor([source]),
            decoder_input_ids=torch.tensor([[0, *target[:-1]]]),
        )
        nll = torch.nn.functional.cross_entropy(out.logits[0], torch.tensor(target))
        total += float(nll.detach()) * len(target)
    assert float(ours) == pytest.approx(total / sum(map(len, targets)), rel=1e-5)


def test_batches_hold_every_sentence_once_and_fit(prepared: Path) -> None:
    recipe = train.Recipe(steps=10)
    corpus = train.Corpus(prepared, recipe, SHAPE, torch.device("cpu"))
    seen = []
    for batch in corpus.epoch(0, dropout=False):
        for side, size in ((batch.source, SHAPE.source), (batch.target, SHAPE.target)):
            assert len(side.tokens) == size
            lengths = side.bounds.diff()
            assert int(lengths.min()) >= 0
            assert int(side.bounds[-1]) <= size
            assert int((side.tokens == 1).sum()) == int((lengths[: SHAPE.sentences] > 0).sum())
        bounds = batch.target.bounds[: SHAPE.sentences + 1].tolist()
        tokens = batch.target.tokens.tolist()
        seen += [tokens[a:b] for a, b in pairwise(bounds) if a < b]
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    assert sorted(seen) == sorted(tokenizer.encode(text).ids for text in texts(prepared)[1])


class Interrupted(Exception):  # noqa: N818
    """Stands for a crash."""


def run(folder: Path, work: Path, crash_at: int | None = None) -> train.Trainer:
    """Twelve steps of a small model, a checkpoint every four."""
    cpu = torch.device("cpu")
    recipe = train.Recipe(steps=12, warm_up=4)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    torch.manual_seed(recipe.seed)
    trainer = train.Trainer(recipe, marian(tokenizer.get_vocab_size(), (1, 1), 64), cpu)
    sides = [Side.of([x.ids for x in tokenizer.encode_batch(t)], cpu) for t in texts(folder)]
    development = Parallel(sides[0], sides[1], SHAPE)
    corpus = train.Corpus(folder, recipe, SHAPE, cpu)

    def log(**entry: Any) -> None:
        if entry["step"] == crash_at:
            raise Interrupted

    work.mkdir(exist_ok=True)
    train.train(trainer, corpus, development, log, work / "checkpoint.safetensors", every=4)
    return trainer


def test_resumed_run_ends_where_an_uninterrupted_one_does(prepared: Path, tmp_path: Path) -> None:
    whole = run(prepared, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(prepared, tmp_path / "halves", crash_at=8)
    resumed = run(prepared, tmp_path / "halves")
    for name, tensor in whole.state().items():
        assert torch.equal(tensor, resumed.state()[name]), name


def test_training_learns_and_the_result_loads(prepared: Path, tmp_path: Path) -> None:
    files = []
    for name, side in zip(prepare.SIDES, texts(prepared), strict=True):
        files.append(tmp_path / name)
        files[-1].write_text("\n".join(side[:20]) + "\n")
    train.make_model(
        prepared,
        (files[0], files[1]),
        tmp_path / "model",
        tmp_path / "work",
        train.Recipe(steps=30, warm_up=5, learning_rate=3e-3),
        SHAPE,
        layers=(1, 1),
        width=64,
        every=10,
        device="cpu",
    )
    log = (tmp_path / "work" / "log.jsonl").read_text().splitlines()
    losses = [entry["development"] for entry in map(json.loads, log) if "development" in entry]
    assert losses[-1] < losses[0]
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.float16
    assert tokenizer.decode(tokenizer("la maison n'est").input_ids) == "la maison n'est</s>"
    assert not list(tmp_path.glob("*.partial"))


def test_speakers_and_marks_are_taken_off() -> None:
    normalize = untrained().normalizer.normalize_str
    pair = ("Author . − Mr President, “yes”.", '(FR) Monsieur l"auteur, « oui ».')
    assert cleaned(pair, normalize) == ('Mr President, "yes".', 'Monsieur l\'auteur, "oui".')
    kept = "There are some areas, etc. – where there is too much."
    assert cleaned((kept, kept), normalize)[0] == kept.replace("–", "-")


@pytest.mark.parametrize(
    ("english", "french", "good"),
    [
        ("A dog.", "Un chien.", True),
        ("OK", "OK", False),
        ("12/34", "A 12/34", False),
        ("A dog.", "Un chien qui court dans la rue avec tous les autres.", False),
        ("", "Rien.", False),
    ],
)
def test_what_is_a_translation(english: str, french: str, good: bool) -> None:
    assert is_translation((english, french)) is good
