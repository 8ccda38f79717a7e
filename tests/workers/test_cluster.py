"""Workers on a Ray cluster, one of whose nodes has no cpsbs, or another one, or no model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cpsbs.workers import Crew, RayPool
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
    with pytest.raises(ValueError, match="the Ray cluster has 2 CPU; a worker needs 3"):
        RayPool(Making(Doubling()), cpus=3)


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
    (tmp_path / "cpsbs.py").write_text("raise ModuleNotFoundError('No module named cpsbs')\n")
    pool = RayPool(Making(Doubling()))
    pool._actor = pool._actor.options(runtime_env={"env_vars": {"PYTHONPATH": str(tmp_path)}})
    assert "cpsbs cannot be imported there; install version " in refusal(pool)


def test_a_node_without_the_model_says_so(ray: Any) -> None:
    assert refusal(RayPool(Refusing())).endswith(": there is no model")
