"""Trains the English–French model on one GPU.

    python -m training.train --prepared DIR --dev EN FR --work DIR --out DIR

If it is interrupted, the same command resumes from the last checkpoint. The result, an ordinary
folder of transformers in half precision, appears when it is complete.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from training.batches import Batch, Parallel, Shape, Side, Words
from training.packed_marian import EAGER, Parts, loss, marian
from training.prepare import SIDES, read_array
from training.tokenizer import END, PAD, UNKNOWN, Segmentations


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of training."""

    steps: int = 36_000
    warm_up: int = 1_500
    """Steps until the learning rate peaks; from there it decreases linearly to zero."""
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.02
    label_smoothing: float = 0.1
    subword_dropout: float = 0.62
    """The fraction of the steps, from the first, that use BPE-dropout."""
    averaged: float = 0.15
    """The fraction of the steps, at the end, over which the weights are averaged."""
    seed: int = 1

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step."""
        falling = (self.steps - step) / max(1, self.steps - self.warm_up)
        return self.learning_rate * min((step + 1) / self.warm_up, falling, 1.0)


class Trainer:
    """The model, its optimiser, the average of its weights, and the recorded training step."""

    def __init__(self, recipe: Recipe, model: Any, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self.model = model.to(device).train()
        self.rate = torch.zeros((), device=device)
        self.total_loss = torch.zeros((), device=device)
        trained = {name: w for name, w in model.named_parameters() if w.requires_grad}
        matrices = [w for name, w in trained.items() if w.ndim == 2 and "shared" not in name]
        others = [w for name, w in trained.items() if w.ndim != 2 or "shared" in name]
        groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": recipe.weight_decay}]
        groups.append({"params": others, "weight_decay": 0.0})
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=self.rate,
            betas=(0.9, 0.98),
            eps=1e-9,
            fused=True,
            capturable=True,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate  # the tensor itself, so that a recorded step sees it change
        self.weights = trained
        self.average = {name: w.detach().clone() for name, w in self.weights.items()}
        self._make_moments()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._parts = EAGER.compiled() if device.type == "cuda" else EAGER
        self._batch: list[Tensor] = []

    def _make_moments(self) -> None:
        """Make the optimiser create its state, by a step with a learning rate of zero."""
        for weight in self.weights.values():
            weight.grad = torch.zeros_like(weight)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def step(self, batch: Batch, step: int) -> None:
        """Do one step of training, without synchronising with the host."""
        self.rate.fill_(self.recipe.rate_at(step))
        if self._graph is None:
            self._body(batch)
        else:
            torch._foreach_copy_(self._batch, batch.tensors())
            self._graph.replay()
        first = round((1 - self.recipe.averaged) * self.recipe.steps)
        if step >= first:
            weights = [w.detach() for w in self.weights.values()]
            torch._foreach_lerp_(list(self.average.values()), weights, 1 / (step - first + 1))

    def _body(self, batch: Batch) -> None:
        value = self.loss(batch, self.recipe.label_smoothing, self._parts)
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.total_loss += value.detach()

    def loss(self, batch: Batch, label_smoothing: float, parts: Parts = EAGER) -> Tensor:
        """Return the loss of a batch; matrices are multiplied in bfloat16 on a GPU."""
        on_gpu = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, on_gpu, cache_enabled=False):
            return loss(self.model, batch, label_smoothing, parts)

    def record(self, batch: Batch) -> None:
        """Record a step as one CUDA graph, since launching its kernels singly doubles its time.

        The state is restored afterwards.
        """
        before = {name: tensor.clone() for name, tensor in self.state().items()}
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._body(batch)
        torch.cuda.current_stream().wait_stream(stream)
        self._batch = batch.tensors()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._body(batch)
        self._graph = graph
        self.restore(before)

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that a step changes, by name, without copying them."""
        state = {f"weight.{name}": w.detach() for name, w in self.weights.items()}
        state |= {f"average.{name}": w for name, w in self.average.items()}
        for name, weight in self.weights.items():
            for part in ("exp_avg", "exp_avg_sq", "step"):
                state[f"{part}.{name}"] = self.optimizer.state[weight][part]
        return state | {"total_loss": self.total_loss}

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Copy saved tensors into the state."""
        for name, tensor in self.state().items():
            tensor.copy_(saved[name])


def save(trainer: Trainer, file: Path, step: int, epoch: int, done: int) -> None:
    """Replace the checkpoint atomically.

    Args:
        trainer: what to save.
        file: the file of the checkpoint.
        step: the number of steps done.
        epoch: the number of the current epoch.
        done: the number of batches of this epoch that are done.
    """
    state = {name: tensor.cpu() for name, tensor in trainer.state().items()}
    state["random"] = torch.get_rng_state()
    if trainer.device.type == "cuda":
        state["cuda_random"] = torch.cuda.get_rng_state()
    partial_file = file.with_suffix(".partial")
    place = {"step": step, "epoch": epoch, "done": done, "recipe": asdict(trainer.recipe)}
    save_file(state, partial_file, {"place": json.dumps(place)})
    os.replace(partial_file, file)


def restored(trainer: Trainer, file: Path) -> tuple[int, int, int]:
    """Restore a checkpoint, and return its step, its epoch and the batches done in it."""
    with safe_open(file, "pt") as stored:
        state = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        place = json.loads(stored.metadata()["place"])
    if place["recipe"] != asdict(trainer.recipe):
        raise ValueError(
            f"{file} is the checkpoint of another recipe, {place['recipe']}; delete it"
        )
    torch.set_rng_state(state.pop("random"))
    if trainer.device.type == "cuda":
        torch.cuda.set_rng_state(state.pop("cuda_random"))
    trainer.restore(state)
    return place["step"], place["epoch"], place["done"]


class Corpus:
    """The training text, which is segmented again for every epoch."""

    def __init__(self, folder: Path, recipe: Recipe, shape: Shape, device: torch.device) -> None:
        with np.load(folder / "segmentations.npz") as stored:
            ways = Segmentations(**stored)
        self._words = [Words(read_array(folder / f"{s}.npy.xz"), ways, device) for s in SIDES]
        self._recipe, self._shape, self._device = recipe, shape, device

    def epoch(self, number: int, dropout: bool) -> Iterator[Batch]:
        """Return all batches of an epoch, which depend on nothing but its number and the seed."""
        generator = torch.Generator(self._device).manual_seed(self._recipe.seed * 1000 + number)
        source, target = (w.segmented(dropout, generator) for w in self._words)
        text = Parallel(source, target, self._shape)
        return map(text.batch, text.batches([self._recipe.seed, number]))


def development_loss(trainer: Trainer, text: Parallel) -> float:
    """Return the loss on text that is not trained on, in nats per token."""
    trainer.model.eval()
    total = tokens = 0.0
    with torch.no_grad():
        for sentences in text.batches([0]):
            count = float(text.target.length[torch.from_numpy(sentences)].sum())
            total += count * float(trainer.loss(text.batch(sentences), 0.0))
            tokens += count
    trainer.model.train()
    return total / tokens


def train(
    trainer: Trainer, corpus: Corpus, development: Parallel, log: Any, checkpoint: Path, every: int
) -> None:
    """Train from the last checkpoint to the end, with a checkpoint every ``every`` steps."""
    recipe = trainer.recipe
    step = epoch = done = 0
    if trainer.device.type == "cuda":
        trainer.record(next(corpus.epoch(0, True)))
    if checkpoint.exists():
        step, epoch, done = restored(trainer, checkpoint)
        log(step=step, resumed=True)
    while step < recipe.steps:
        dropout = step - done < recipe.subword_dropout * recipe.steps
        for number, batch in enumerate(corpus.epoch(epoch, dropout)):
            if number < done:
                continue
            if step == recipe.steps:
                break
            trainer.step(batch, step)
            step, done = step + 1, number + 1
            if step % every == 0:
                log(
                    step=step,
                    epoch=epoch,
                    loss=float(trainer.total_loss) / every,
                    development=development_loss(trainer, development),
                )
                trainer.total_loss.zero_()
                save(trainer, checkpoint, step=step, epoch=epoch, done=done)
        epoch, done = epoch + 1, 0


def export(model: Any, tokenizer: Path, out: Path) -> None:
    """Save model and tokenizer in the format of transformers, in shards below 16 MB."""
    partial_folder = out.with_name(out.name + ".partial")
    shutil.rmtree(partial_folder, ignore_errors=True)
    model.half().save_pretrained(partial_folder, max_shard_size="14MB")
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(tokenizer),
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        model_max_length=256,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(partial_folder)
    partial_folder.rename(out)


def write_log(file: Path, start: float, **entry: Any) -> None:
    """Write an entry as a line to the file and to the terminal."""
    line = json.dumps({"seconds": round(time.monotonic() - start, 1), **entry})
    print(line, flush=True)
    with file.open("a") as log:
        log.write(line + "\n")


def make_model(
    prepared: Path,
    development_files: tuple[Path, Path],
    out: Path,
    work: Path,
    recipe: Recipe,
    shape: Shape,
    layers: tuple[int, int] = (8, 4),
    width: int = 256,
    every: int = 1000,
    device: str = "cuda",
) -> None:
    """Train a model on prepared text, and export it to a folder that transformers reads."""
    if out.exists():
        raise ValueError(f"out is {out}, which exists already; choose another folder")
    work.mkdir(parents=True, exist_ok=True)
    log = partial(write_log, work / "log.jsonl", time.monotonic())
    place = torch.device(device)
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    torch.manual_seed(recipe.seed)
    trainer = Trainer(recipe, marian(tokenizer.get_vocab_size(), layers, width), place)
    log(**asdict(recipe), parameters=sum(w.numel() for w in trainer.weights.values()))
    lines = [file.read_text(encoding="utf-8").splitlines() for file in development_files]
    sides = [Side.of([x.ids for x in tokenizer.encode_batch(text)], place) for text in lines]
    development = Parallel(sides[0], sides[1], shape)
    corpus = Corpus(prepared, recipe, shape, place)
    log(read=True)
    train(trainer, corpus, development, log, work / "checkpoint.safetensors", every)
    for name, weight in trainer.weights.items():
        weight.data.copy_(trainer.average[name])
    log(finished=True, development=development_loss(trainer, development))
    export(trainer.model, prepared / "tokenizer.json", out)


def main() -> None:
    """Train the model that the arguments describe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--prepared", type=Path, required=True, help="folder that training.prepare wrote"
    )
    parser.add_argument(
        "--dev", type=Path, nargs=2, required=True, help="English and French development text"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoint and log")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="steps of training")
    parser.add_argument("--every", type=int, default=1000, help="steps between checkpoints")
    given = parser.parse_args()
    recipe = Recipe(steps=given.steps)
    make_model(
        given.prepared, tuple(given.dev), given.out, given.work, recipe, Shape(), every=given.every
    )


if __name__ == "__main__":
    main()
