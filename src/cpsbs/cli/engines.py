"""Where a command computes: in this process, on the cores of this machine, or on a Ray cluster.

A command's work is a value, such as ``SampleWork``, which turns batches of texts into records. An
engine applies it: it decides who computes a batch, and nothing else. The batches, the random
streams and, for models that fit on one core, the number of threads that a batch is computed with
are the same everywhere, and so are the results, to the last digit.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch

from cpsbs.cli.batches import Note, default_batch_size
from cpsbs.cli.draws import ModelChoice
from cpsbs.cli.options import EngineName
from cpsbs.cli.ordered import Record
from cpsbs.cli.source import Batch
from cpsbs.cli.terminal import print_message
from cpsbs.fingerprint import model_fingerprint
from cpsbs.search.more import Progress
from cpsbs.search.parallel import threads_for
from cpsbs.text import TextModel, embedded_models
from cpsbs.threads import map_in_threads
from cpsbs.workers import Crew, Failed, RayPool, in_order

GPU_BATCHES = 8
"""How many batches a worker with a GPU gets at once, after the first one.

Texts of later ones take the places of texts that have ended (continuous batching).
"""

AHEAD = 2
"""How many tasks for each worker are begun before the first of them is done."""


class Work(Protocol):
    """What a command computes from its texts. It is small, and can be pickled."""

    def records(
        self, model: TextModel, batches: Iterable[Batch], progress: Progress
    ) -> Iterator[list[Record]]:
        """Yield the records of each batch, in their order.

        Args:
            model: the model.
            batches: the texts.
            progress: takes the captured probability of the texts of a batch, if that takes long.
        """


@dataclass(frozen=True)
class Place:
    """What results depend on where they are computed."""

    dtype: str
    device: str
    """The type of the device."""
    libraries: str
    """The libraries that compute, and their versions."""
    batch_size: int = field(compare=False)
    """The default for the number of texts to compute at once."""

    @staticmethod
    def of(model: TextModel, k: int, max_length: int) -> Place:
        """Return what results depend on where this model is.

        Args:
            model: the model, with its weights.
            k: the largest number of sequences for a text.
            max_length: the largest number of new tokens.
        """
        return Place(
            model.quantize or str(model.model.dtype),
            model.model.device.type,
            f"torch {torch.__version__}, transformers {version('transformers')}",
            default_batch_size(model, k, max_length),
        )


class Engine(ABC):
    """Computes the work of a command."""

    model: TextModel
    """The model, possibly without its weights: it tells which texts it can take."""

    @cached_property
    def content(self) -> str:
        """The fingerprint of the model, for which its files are read."""
        return content_of(self.model)

    @abstractmethod
    def prepare(self, k: int, max_length: int) -> Place:
        """Get ready, and return what results depend on; the arguments are those of ``Place.of``."""

    @abstractmethod
    def threads(self, alone: bool) -> int:
        """Return how many threads compute a batch on a CPU, which decides the last digits."""

    @abstractmethod
    def compute(
        self, work: Work, batches: Iterable[Batch], note: Note, alone: bool
    ) -> Iterator[list[Record]]:
        """Yield the records of each batch, in their order.

        Args:
            work: what to compute.
            batches: the texts, possibly without an end.
            note: shows how far a batch is.
            alone: whether there is only one batch, and somebody waits for it.
        """

    def close(self) -> None:  # noqa: B027, because this process needs nothing
        """Release what is held elsewhere."""


class LocalEngine(Engine):
    """Computes in this process: on a GPU, or several batches at once on the cores of a CPU.

    Args:
        choice: the model.
    """

    def __init__(self, choice: ModelChoice) -> None:
        self.model = choice.load()
        self._at_once = threads_for(self.model.sequence_model(["."]))

    def prepare(self, k: int, max_length: int) -> Place:
        """Return what results depend on here."""
        return Place.of(self.model, k, max_length)

    def threads(self, alone: bool) -> int:
        """Return how many threads compute a batch: one, where several batches share the cores."""
        return torch.get_num_threads() if alone or self._at_once == 1 else 1

    def compute(
        self, work: Work, batches: Iterable[Batch], note: Note, alone: bool
    ) -> Iterator[list[Record]]:
        """Yield the records of each batch, in their order."""
        if alone or self._at_once == 1:
            yield from work.records(self.model, batches, note.captured)
            return

        def one(batch: Batch) -> list[Record]:
            return next(work.records(self.model, [batch], note.captured))

        yield from map_in_threads(one, batches, self._at_once)


class RayEngine(Engine):
    """Computes on a Ray cluster; this process reads, hands out batches and writes.

    Args:
        choice: the model, which must be on this machine too, because texts are checked here.
        address: the address of the cluster; see ``cpsbs.workers.cluster.connect``.
        workers: the number of workers; by default one for each GPU, or as many as there are cores.
        cores: the number of cores for a worker.
    """

    def __init__(
        self, choice: ModelChoice, address: str | None, workers: int | None, cores: int
    ) -> None:
        self.model = choice.outline()
        self._choice, self._address = choice, address
        self._workers, self._cores = workers, cores
        self._crew: Crew | None = None
        self._device = "cpu"

    def prepare(self, k: int, max_length: int) -> Place:
        """Start the workers, and return what results depend on when the first one is ready."""
        choice, folder = self._choice, Path(self._choice.name)
        if choice.name not in embedded_models() and folder.exists():
            choice = replace(choice, name=str(folder.resolve()))  # workers have other folders
        make = partial(
            BatchWorker, choice, self.model.name, self.content, self._cores, k, max_length
        )
        device = self._choice.device
        gpus = None if device is None else float(torch.device(device).type != "cpu")
        wait = self._workers is not None
        pool = RayPool(make, self._cores, gpus, self._address, wait_for_room=wait)
        self._workers = self._workers or pool.fitting
        self._crew = Crew(pool, self._workers, partial(print_message, "note"))
        place = self._crew.ready()
        assert isinstance(place, Place)
        self._device = place.device
        return place

    def compute(
        self, work: Work, batches: Iterable[Batch], note: Note, alone: bool
    ) -> Iterator[list[Record]]:
        """Yield the records of each batch, in their order."""
        assert self._crew is not None
        assert self._workers is not None
        tasks = ((work, group) for group in self._groups(batches))
        for (_, group), event in in_order(self._crew, tasks, AHEAD * self._workers + 1):
            if isinstance(event, Failed):
                raise _error(event, group)
            for warned in event.warned:
                warnings.warn(warned, stacklevel=1)
            yield from event.value

    def threads(self, alone: bool) -> int:
        """Return the number of cores of a worker."""
        return self._cores

    def close(self) -> None:
        """Stop the workers, and disconnect from the cluster."""
        if self._crew is not None:
            self._crew.stop()

    def _groups(self, batches: Iterable[Batch]) -> Iterator[list[Batch]]:
        """Yield the batches that a worker gets at once; the first one comes alone, to be early."""
        rest, most = iter(batches), 1
        while group := list(islice(rest, most)):
            yield group
            most = 1 if self._device == "cpu" else GPU_BATCHES


class BatchWorker:
    """Computes batches of texts on a node of a cluster, with a model that it loads there.

    Args:
        choice: the model, as it is found on the node.
        name: what results call it.
        content: the fingerprint that it must have.
        cores: the number of threads to compute with.
        k: the largest number of sequences for a text.
        max_length: the largest number of new tokens.

    Raises:
        ValueError: if the model is not there, or is another one.
    """

    def __init__(
        self, choice: ModelChoice, name: str, content: str, cores: int, k: int, max_length: int
    ) -> None:
        torch.set_num_threads(cores)
        model = choice.load()
        found = content_of(model)
        if found != content:
            raise ValueError(
                f"the model {choice.name} has the fingerprint {found} there and {content} here; "
                "copy the same files there"
            )
        self._model = replace(model, name=name)
        self.facts = Place.of(self._model, k, max_length)

    def compute(self, task: tuple[Work, list[Batch]]) -> list[list[Record]]:
        """Return the records of each batch."""
        work, batches = task
        return list(work.records(self._model, batches, lambda _: None))


def content_of(model: TextModel) -> str:
    """Return the fingerprint of a model that has just been loaded."""
    return model_fingerprint(model.name, model.model.config)


def chosen_engine(
    choice: ModelChoice,
    engine: EngineName,
    address: str | None,
    workers: int | None,
    cores: int | None,
) -> Engine:
    """Return the engine that the options name, with its model."""
    if engine is EngineName.ray:
        return RayEngine(choice, address, workers, cores or 1)
    for name, value in (("--address", address), ("--workers", workers), ("--cores", cores)):
        if value is not None:
            raise ValueError(f"{name} is {value}, which needs --engine ray; give that too")
    return LocalEngine(choice)


def _error(event: Failed, group: list[Batch]) -> Exception:
    """Return the error to raise for a task that failed."""
    if event.kind == "OutOfMemoryError":
        return torch.OutOfMemoryError(event.reason)
    numbers = [number for batch in group for number in batch.numbers]
    texts = f"texts {min(numbers) + 1} to {max(numbers) + 1}"
    return RuntimeError(f"{event.reason} (a worker computed some of {texts})")
