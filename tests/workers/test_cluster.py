"""Workers on a Ray cluster, one of whose nodes has no cpsbs, or another one, or no model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cpsbs.workers import Crew, Done, RayPool
from cpsbs.workers.cluster import connect
from tests.workers.computing import Doubling, Making, Refusing, results, values

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings


@pytest.fixture
def ray() -> Iterator[Any]:
    module = pytest.importorskip("ray")
    module.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield module
    module.shutdown()


def test_actors_compute_and_survive_kills(ray: Any, tmp_path: Any) -> None:
    for task in (0, 3):
        (tmp_path / str(task)).touch()
    found = results(RayPool(Making(Doubling(traps=tmp_path))), range(5))
    assert values(found) == {i: 2 * i for i in range(5)}
    assert not list(tmp_path.iterdir())


def test_a_cluster_without_room_is_told(ray: Any) -> None:
    told = "a worker needs 3 CPU of one node; the nodes of the Ray cluster have 2 CPU"
    with pytest.raises(ValueError, match=told):
        RayPool(Making(Doubling()), cpus=3)
    assert RayPool(Making(Doubling()), cpus=3, wait_for_room=True).fitting == 0
    assert RayPool(Making(Doubling()), gpus=None).fitting == 2  # there are no GPUs


def test_a_connection_of_somebody_else_is_used_and_left(ray: Any) -> None:
    assert connect(None) is ray
    results(RayPool(Making(Doubling())), [1])
    assert ray.is_initialized()


def refusal(pool: RayPool) -> str:
    crew = Crew(pool, 1)
    with pytest.raises(RuntimeError, match="no worker can be used: node ") as caught:
        crew.ready()
    crew.stop()
    return str(caught.value)


def test_a_node_with_another_cpsbs_says_so(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RayPool(Making(Doubling()))
    pool._arguments = ("99.0", pool._arguments[1])
    assert "is installed there, and 99.0 here; install the same" in refusal(pool)


def test_a_node_without_cpsbs_says_so(ray: Any, tmp_path: Any) -> None:
    for line, told in (
        ("raise ModuleNotFoundError('No module', name='cpsbs')", "imported there; install version"),
        ("import a_package_that_is_missing", "there (No module named 'a_package_that_is_missing')"),
    ):
        (tmp_path / "cpsbs.py").write_text(f"{line}\n")
        pool = RayPool(Making(Doubling()))
        pool._actor = pool._actor.options(runtime_env={"env_vars": {"PYTHONPATH": str(tmp_path)}})
        assert told in refusal(pool)


def test_actors_that_die_while_they_are_idle_cost_no_task(ray: Any) -> None:
    pool, started = RayPool(Making(Doubling())), []
    start = pool.start

    def noted() -> Any:
        started.append(start())
        return started[-1]

    pool.start = noted  # type: ignore[method-assign]
    crew = Crew(pool, 2)
    assert len(list(crew.compute(range(4)))) == 4
    for actor in started:
        ray.kill(actor)
    ((_, _, event),) = crew.compute([5])
    assert isinstance(event, Done)
    assert event.value == 10
    crew.stop()


def test_another_address_while_connected_is_refused(ray: Any) -> None:
    with pytest.raises(ValueError, match="but this process is connected to "):
        connect("10.0.0.1:6379")


def test_a_node_without_the_model_says_so(ray: Any) -> None:
    assert refusal(RayPool(Refusing())).endswith(": there is no model")
