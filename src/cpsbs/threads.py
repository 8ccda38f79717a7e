"""Computes many things at once, each in one thread of a CPU, and returns the results in order.

A step of a small model is many short operations, between which the threads of a single operation
wait for each other, so that several batches, one a thread, are done sooner than one after another.
And a sum that one thread adds up has the same last digit on every machine, however many cores it
has: results computed here do not depend on how many things are computed at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

AHEAD = 2
"""How many things for each thread are begun before the first of them is done.

So a thread has work while another one is late with a result that comes before its own.
"""

T = TypeVar("T")
R = TypeVar("R")

_here = threading.local()


class NotWantedError(Exception):
    """Raised in a thread whose result nobody wants any more."""


def check_wanted() -> None:
    """Raise a ``NotWantedError`` if nobody wants any more what the current thread computes."""
    cancelled: threading.Event | None = getattr(_here, "cancelled", None)
    if cancelled is not None and cancelled.is_set():
        raise NotWantedError


def map_in_threads(compute: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Yield the result of each item, in the order of the items.

    Items are taken in the caller's thread, a few ahead of what is yielded, and in one thread too:
    the cores are busy. If one cannot be taken or computed, the results of those before it are
    yielded first.

    Args:
        compute: computes the result of an item, in a thread in which torch uses no others.
        items: the items, possibly without an end.
        threads: the number of results to compute at the same time.
    """
    cancelled = threading.Event()
    executor = _one_core_each(threads, cancelled)
    rest = iter(items)
    running: deque[Future[R]] = deque()
    failure: BaseException | None = None
    try:
        while True:
            while failure is None and len(running) < AHEAD * threads:
                # What is done is yielded before the next item is taken, since that may take long.
                if running and running[0].done():
                    break
                try:
                    with _one_core():
                        item = next(rest)
                    running.append(executor.submit(compute, item))
                except StopIteration as end:
                    failure = end
                except Exception as error:
                    failure = error
            if not running:
                break
            yield running.popleft().result()
        if failure is not None and not isinstance(failure, StopIteration):
            raise failure
    finally:
        cancelled.set()
        executor.shutdown(cancel_futures=True)


@contextmanager
def _one_core() -> Iterator[None]:
    """Let torch use one core in this thread for a while, because its idle threads would spin."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _one_core_each(threads: int, cancelled: threading.Event) -> ThreadPoolExecutor:
    """Return a thread pool in which torch uses one core per thread; others keep their setting."""
    before, all_there = torch.get_num_threads(), threading.Barrier(threads + 1)

    def begin() -> None:
        _here.cancelled = cancelled
        torch.set_num_threads(1)
        # A thread takes over the common setting when it first asks; so it asks before that changes.
        torch.get_num_threads()
        all_there.wait()

    executor = ThreadPoolExecutor(threads, "cpsbs", begin)
    try:
        for _ in range(threads):
            executor.submit(lambda: None)
        all_there.wait()
    except BaseException:
        # A thread could not be started: those that have been must not wait for it for ever.
        all_there.abort()
        executor.shutdown(cancel_futures=True)
        raise
    finally:
        torch.set_num_threads(before)
    return executor
