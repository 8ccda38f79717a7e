"""Workers on a Ray cluster: what is sent where, and what becomes of a node that dies.

An actor that Ray starts on a node gets three things: the version of cpsbs, what to make a worker
with (of a model its name, never its weights), and one task after another. The model is loaded
there, from the folder, the hub or the cache of that node. Actors are neither restarted nor retried
by Ray: when one dies, with its node or alone, ``Crew`` starts another one wherever there is room,
and hands it the task.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
from typing import Any

from cpsbs.extras import required
from cpsbs.workers.pools import Died, Event, Failed, Make, Pool, Refused, told

CLIENT = "ray://"


def connect(address: str | None) -> Any:
    """Return the module ``ray``, connected to a cluster.

    Args:
        address: where the cluster is; "auto" for the one that this machine belongs to. None starts
            one on this machine, unless the environment variable ``RAY_ADDRESS`` names another.

    Raises:
        ValueError: if there is no cluster at this address; it says what to do.
    """
    ray: Any = required("ray", "ray")
    option = "RAY_ADDRESS" if address is None else "--address"
    where = address or os.environ.get("RAY_ADDRESS")
    if ray.is_initialized():
        connected = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", connected):
            raise ValueError(
                f"--address is {address}, but this process is connected to {connected}; call "
                "ray.shutdown() first"
            )
        return ray
    if where is not None and where.startswith(CLIENT):
        raise ValueError(
            f"{option} is {where}, which is that of a Ray client; run the command on a node of "
            "the cluster, with --address auto"
        )
    # Ray reports events of the cluster on standard output, where results may go.
    os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    options = {} if where else {"include_dashboard": False}
    try:
        _check_answers(_resolved(where))
        ray.init(
            address=where or "local",
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            **options,
        )
    except (OSError, RuntimeError, ValueError) as error:
        if not where:
            raise RuntimeError(
                f"Ray could not be started on this machine: {_line(error)}"
            ) from error
        raise ValueError(
            f"{option} is {where}, where no Ray cluster can be used: {_line(error)}; start one "
            "with 'ray start --head', or leave --address out to start one on this machine"
        ) from error
    return ray


def _resolved(address: str | None) -> str | None:
    """Return the host and port that an address stands for, or None if a cluster is started here."""
    if address != "auto":
        return address
    try:  # where Ray notes the cluster of this machine, which need not be alive
        from ray._private.services import canonicalize_bootstrap_address
    except ImportError:
        return None
    found: str | None = canonicalize_bootstrap_address(address)
    return found


def _check_answers(address: str | None) -> None:
    """Raise an ``OSError`` if nobody listens at an address; Ray itself would wait for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            raise OSError(f"nobody answers at {address} ({error})") from error


class RayPool(Pool):
    """Actors on a Ray cluster, on every node of which the same cpsbs must be installed.

    Args:
        make: makes a worker on its node.
        cpus: the number of processors that a worker occupies.
        gpus: the share of a GPU that it occupies; by default one, if the cluster has any.
        address: as for ``connect``.
        wait_for_room: whether to wait if the cluster has no room for any worker: its autoscaler may
            add a node.

    Attributes:
        fitting: the number of workers for which the cluster has room now, whoever uses it.

    Raises:
        ValueError: if there is no cluster, or no room for a worker in it.
    """

    def __init__(
        self,
        make: Make,
        cpus: float = 1,
        gpus: float | None = 0.0,
        address: str | None = None,
        wait_for_room: bool = False,
    ) -> None:
        from cpsbs import __version__

        self._ours = not required("ray", "ray").is_initialized()
        self._ray = connect(address)
        try:
            nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            if gpus is None:
                gpus = float(any(node.get("GPU", 0.0) >= 1 for node in nodes))
            need = {name: float(n) for name, n in (("CPU", cpus), ("GPU", gpus)) if n}
            self.fitting = sum(_fitting(node, need) for node in nodes)
            if not self.fitting and not wait_for_room:
                raise ValueError(_no_room(nodes, need))
        except BaseException:
            self.close()
            raise
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0}
        # Workers of one node share its memory bandwidth: use all nodes before one is full.
        self._actor = self._ray.remote(scheduling_strategy="SPREAD", **options)(_actor_class())
        self._arguments = (__version__, pickle.dumps(make))
        self._pending: dict[Any, Any] = {}
        """The call that each worker is at."""
        self._begun: dict[Any, Any] = {}
        """The call before it, which tells whether the worker had begun its task."""

    def start(self) -> Any:
        """Ask for one more actor, which starts as soon as there is room."""
        actor = self._actor.remote(*self._arguments)
        self._pending[actor] = actor.prepare.remote()
        return actor

    def send(self, worker: Any, task: Any) -> None:
        """Start computing a task, without waiting for the result."""
        self._begun[worker] = worker.begin.remote()
        self._pending[worker] = worker.compute.remote(task)

    def wait(self, workers: list[Any], timeout: float | None) -> list[tuple[Any, Event]]:
        """Wait for at least one actor, and return what they report."""
        calls = {self._pending[worker]: worker for worker in workers}
        if not calls:
            return []
        try:
            ready, _ = self._ray.wait(list(calls), num_returns=1, timeout=timeout)
        except self._ray.exceptions.RaySystemError as error:
            raise RuntimeError(f"the Ray cluster is gone: {_line(error)}") from error
        return [(calls[call], self._report(calls[call], call)) for call in ready]

    def _report(self, worker: Any, call: Any) -> Event:
        errors = self._ray.exceptions
        try:
            report: Any = self._ray.get(call)
        except errors.RayTaskError as error:
            # Not of the task itself, which reports its errors, but of what came or went.
            return Failed(type(error).__name__, _line(error))
        except errors.RayError:
            event = Died(self._had_begun(worker))
            self.stop(worker)
            return event
        if isinstance(report, dict):
            return Refused(f"{report['where']}: {report['refused']}")
        found: Event = report
        return found

    def _had_begun(self, worker: Any) -> bool:
        if (call := self._begun.get(worker)) is None:
            return False
        try:
            self._ray.get(call, timeout=10)
        except self._ray.exceptions.RayError:
            return False
        return True

    def stop(self, worker: Any) -> None:
        """Kill the actor, and forget what it was at."""
        self._pending.pop(worker, None)
        self._begun.pop(worker, None)
        self._ray.kill(worker)

    def close(self) -> None:
        """Disconnect from the cluster, unless others had connected to it."""
        if self._ours:
            self._ray.shutdown()


def _fitting(node: dict[str, float], need: dict[str, float]) -> int:
    """Return how many workers fit on a node with these resources."""
    return int(min(node.get(name, 0.0) // amount for name, amount in need.items()))


def _no_room(nodes: list[dict[str, float]], need: dict[str, float]) -> str:
    """Return the message for a cluster none of whose nodes has room for a worker."""
    wanted = " and ".join(f"{amount:g} {name}" for name, amount in need.items())
    there = "; ".join(
        ", ".join(f"{node.get(name, 0.0):g} {name}" for name in need) for node in nodes
    )
    return (
        f"a worker needs {wanted} of one node; the nodes of the Ray cluster have {there}. Add a "
        "larger node, use fewer --cores, or choose another --device"
    )


def _actor_class() -> type:
    """Return the class of the actors.

    It is made here so that it travels by value, and needs nothing of cpsbs: a node without cpsbs,
    or with another version of it, can say so.
    """

    class Actor:
        def __init__(self, version: str, make: bytes) -> None:
            self._version, self._make = version, make

        def prepare(self) -> Any:
            import pickle
            import socket

            import ray

            address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            where = f"node {address} ({socket.gethostname()})"
            try:
                import cpsbs
            except Exception as error:
                told = "" if getattr(error, "name", None) == "cpsbs" else f" ({error})"
                why = f"cpsbs cannot be imported there{told}; install version {self._version}"
                return {"where": where, "refused": why}
            if cpsbs.__version__ != self._version:
                why = (
                    f"cpsbs {cpsbs.__version__} is installed there, and {self._version} here; "
                    "install the same"
                )
                return {"where": where, "refused": why}
            try:
                from cpsbs.workers.pools import made

                make = pickle.loads(self._make)
            except Exception as error:  # other code, or a package that cpsbs needs is missing
                return {"where": where, "refused": f"{type(error).__name__}: {error}"}
            self._worker, report = made(make, where)
            return report

        def begin(self) -> None:
            """Tell that the worker was alive when its task came."""

        def compute(self, task: Any) -> Any:
            from cpsbs.workers.pools import outcome

            assert self._worker is not None
            return outcome(self._worker, task)

    return Actor


def _line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    return " ".join(told(error).split())[:300].rstrip(".")
