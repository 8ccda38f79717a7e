"""A crew computes every task, even if workers die, and says why where it cannot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from cpsbs.workers import Crew, Died, Done, Failed, Refused, in_order
from cpsbs.workers import crew as crews
from tests.workers.computing import Doubling, Here, Making, Refusing, results, values

DOUBLING = Making(Doubling())


def test_every_task_is_computed_once() -> None:
    assert values(results(Here(DOUBLING), range(10))) == {i: 2 * i for i in range(10)}


def test_results_come_in_the_order_of_the_tasks_and_bounded() -> None:
    crew, taken = Crew(Here(DOUBLING), 3), list[int]()

    def noted() -> Iterator[int]:
        for task in itertools.count():
            taken.append(task)
            yield task

    found = in_order(crew, noted(), ahead=5)
    for number in range(12):
        task, event = next(found)
        assert (task, event.value if isinstance(event, Done) else None) == (number, 2 * number)
        assert len(taken) <= number + 1 + 5
    crew.stop()


def test_an_error_of_a_task_is_its_result_and_no_more() -> None:
    found = results(Here(DOUBLING), [12, 13, 14])
    assert found[13] == Failed("ValueError", "13 is refused")
    assert values({task: found[task] for task in (12, 14)}) == {12: 24, 14: 28}


def test_what_a_worker_warns_of_is_passed_on() -> None:
    done = results(Here(DOUBLING), [7])[7]
    assert isinstance(done, Done)
    assert [str(warned) for warned in done.warned] == ["7 is odd"]


def test_a_worker_that_cannot_be_used_is_told_once_and_others_do_its_work() -> None:
    told: list[str] = []
    refused = Refused("node 1: no cpsbs")
    crew = Crew(Here(refused, refused, DOUBLING), 3, told.append)
    assert sorted(task for _, task, _ in crew.compute(range(20))) == list(range(20))
    (only,) = told
    assert "node 1: no cpsbs" in only


def test_the_last_worker_that_cannot_be_used_is_an_error() -> None:
    crew = Crew(Here(Refusing()), 2)
    with pytest.raises(RuntimeError, match="no worker can be used: worker 1: there is no model"):
        crew.ready()


def test_a_worker_that_would_compute_something_else_is_refused() -> None:
    told: list[str] = []
    pool = Here(Making(Doubling({"dtype": "float32"})), Making(Doubling({"dtype": "float16"})))
    crew = Crew(pool, 2, told.append)
    assert crew.ready() == {"dtype": "float32"}
    assert len(list(crew.compute(range(5)))) == 5
    assert "dtype is float16, not float32" in told[0]
    assert pool.stopped == [1]


def test_workers_that_die_as_they_start_are_given_up() -> None:
    crew = Crew(Here(Died()), 1)
    with pytest.raises(RuntimeError, match="workers died 3 times in a row while they started"):
        crew.ready()


def test_workers_that_die_together_as_they_start_count_once() -> None:
    """As when the node with most of them goes down while they load the model."""
    told: list[str] = []
    crew = Crew(Here(*[Died()] * 12, DOUBLING), 8, told.append)
    assert len(list(crew.compute(range(50)))) == 50
    assert told == []


def test_what_cannot_be_read_there_is_told() -> None:
    crew = Crew(Here(Failed("ImportError", "cannot import name 'made'")), 1)
    with pytest.raises(RuntimeError, match="no worker can be used: cannot import name 'made'"):
        crew.ready()


def test_what_is_done_is_reported_before_the_next_task_is_waited_for() -> None:
    """A pipe may pause; what was computed meanwhile must not wait for it."""
    reported: list[int] = []

    def tasks() -> Iterator[int]:
        for task in range(6):
            assert len(reported) >= task - 1
            yield task

    for _, task, _ in Crew(Here(DOUBLING), 2).compute(tasks()):
        reported.append(task)
    assert sorted(reported) == list(range(6))


def test_a_worker_that_does_not_come_is_waited_for_so_long_and_the_user_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Nobody(Here):
        def wait(self, workers: list[int], timeout: float | None) -> list[tuple[int, object]]:  # type: ignore[override]
            return []

    told: list[str] = []
    monkeypatch.setattr(crews, "START_TIMEOUT", 0.05)
    with pytest.raises(RuntimeError, match="no worker was ready within 0 seconds; free a"):
        Crew(Nobody(Died()), 1, told.append).ready()
    assert told == ["waiting for a worker: it loads the model, or others occupy its place"]


def test_stopping_stops_everybody_and_releases_the_pool() -> None:
    pool = Here(DOUBLING)
    crew = Crew(pool, 2)
    crew.ready()
    crew.stop()
    assert sorted(pool.stopped) == [0, 1]
    assert pool.closed
