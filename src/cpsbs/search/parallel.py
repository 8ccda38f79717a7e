"""Searches the models of many requests at once, on the cores of a CPU.

A step of a small model is many short operations, between which the threads of a single operation
wait for each other. So where there are several batches, every core searches a batch of its own.
What a source gets does not depend on it, apart from rounding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import torch

from cpsbs.models.base import ConcurrentModel, SequenceModel
from cpsbs.search.beams import Beams
from cpsbs.search.requests import Request, RequestQueue

MOST_THREADS = 8
"""The most searches at a time: each needs memory of its own."""

Search = Callable[[Request], Beams]
"""Searches the sources of a request, and returns what was found."""

Outcome = tuple[int, Beams | BaseException | None]
"""The number of a request with what was found or what went wrong; None after the last one."""


def threads_for(model: SequenceModel) -> int:
    """Return how many searches of models like this one may run at the same time."""
    on_cpu = torch.device(model.device).type == "cpu"
    if not on_cpu or not isinstance(model, ConcurrentModel) or not model.concurrent:
        return 1
    return min(MOST_THREADS, torch.get_num_threads())


def search_at_once(queue: RequestQueue, search: Search, threads: int) -> Iterator[Beams]:
    """Yield the beams of every request, in the order of the requests.

    Requests are taken from the queue one at a time, at most ``threads`` ahead of what is yielded.
    If one fails, those before it are yielded first.
    """
    workers = _Workers(queue, search, threads)
    found: dict[int, Beams | BaseException | None] = {}
    try:
        number = 0
        while True:
            while number not in found:
                key, outcome = workers.outcomes.get()
                found[key] = outcome
            outcome = found.pop(number)
            if outcome is None:
                return
            if isinstance(outcome, BaseException):
                raise outcome
            workers.may_begin.release()
            yield outcome
            number += 1
    finally:
        workers.stop()


class _Workers:
    """Threads that search requests until there are no more, or they are told to stop."""

    def __init__(self, queue: RequestQueue, search: Search, threads: int) -> None:
        self.outcomes = SimpleQueue[Outcome]()
        self.may_begin = threading.Semaphore(threads)
        """Counts the requests that may begin."""
        self._queue, self._search = queue, search
        self._lock, self._stopped, self._begun = threading.Lock(), False, 0
        self._running = set[Request]()
        ready = threading.Barrier(threads + 1)
        given = (ready, max(1, torch.get_num_threads() // threads))
        self._threads = [threading.Thread(target=self._work, args=given) for _ in range(threads)]
        for thread in self._threads:
            thread.start()
        ready.wait()
        torch.set_num_threads(torch.get_num_threads())  # for threads that others start later

    def _work(self, ready: threading.Barrier, each: int) -> None:
        torch.set_num_threads(each)
        # A thread takes over the common setting when it first asks; so it asks before that changes.
        torch.get_num_threads()
        ready.wait()
        with torch.no_grad():
            while self._go_on():
                pass

    def _go_on(self) -> bool:
        """Search the next request; return whether there was one."""
        self.may_begin.acquire()
        with self._lock:
            if self._stopped:
                return False
            number = self._begun
            self._begun += 1
            try:
                request = self._queue.take()
            except BaseException as error:
                return self._end(number, error)
            if request is None:
                return self._end(number, None)
            self._running.add(request)
        try:
            self.outcomes.put((number, self._search(request)))
        except BaseException as error:
            self.outcomes.put((number, error))
        with self._lock:
            self._running.discard(request)
        return True

    def _end(self, number: int, outcome: BaseException | None) -> bool:
        """Let no more requests begin, because there are none or one could not be made."""
        self.outcomes.put((number, outcome))
        self._stopped = True
        self._wake()
        return False

    def _wake(self) -> None:
        self.may_begin.release(len(self._threads))

    def stop(self) -> None:
        """End the searches that are running, and wait for the threads."""
        with self._lock:
            self._stopped = True
            for request in self._running:
                request.cancelled = True
        self._wake()
        for thread in self._threads:
            thread.join()
