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
from cpsbs.workers.pools import Event, Failed, Make, Pool, Refused, told

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
    if ray.is_initialized():
        return ray
    if address is not None and address.startswith(CLIENT):
        raise ValueError(
            f"--address is {address}, which is that of a Ray client; run the command on a node of "
            "the cluster, with --address auto"
        )
    # Ray reports events of the cluster on standard output, where results may go.
    os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    where = address or os.environ.get("RAY_ADDRESS")
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
            f"--address is {where}, where no Ray cluster can be used: {_line(error)}; start one "
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
        gpus: the share of a GPU that it occupies.
        address: as for ``connect``.
        wait_for_room: whether to wait if the cluster has no room for any worker: its autoscaler may
            add a node.

    Raises:
        ValueError: if there is no cluster, or no room for a worker in it.
    """

    def __init__(
        self,
        make: Make,
        cpus: float = 1,
        gpus: float = 0.0,
        address: str | None = None,
        wait_for_room: bool = False,
    ) -> None:
        from cpsbs import __version__

        self._ours = not required("ray", "ray").is_initialized()
        self._ray = connect(address)
        if not wait_for_room:
            self._check_room({"CPU": float(cpus), "GPU": gpus})
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0}
        # Workers of one node share its memory bandwidth: use all nodes before one is full.
        self._actor = self._ray.remote(scheduling_strategy="SPREAD", **options)(_actor_class())
        self._arguments = (__version__, pickle.dumps(make))
        self._pending: dict[Any, Any] = {}
        """The call that each worker is at."""

    def start(self) -> Any:
        """Ask for one more actor, which starts as soon as there is room."""
        actor = self._actor.remote(*self._arguments)
        self._pending[actor] = actor.prepare.remote()
        return actor

    def send(self, worker: Any, task: Any) -> None:
        """Start computing a task, without waiting for the result."""
        self._pending[worker] = worker.compute.remote(task)

    def wait(self, workers: list[Any], timeout: float | None) -> list[tuple[Any, Event]]:
        """Wait for at least one actor, and return what they report."""
        calls = {self._pending[worker]: worker for worker in workers}
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
            self.stop(worker)
            return None
        if isinstance(report, dict):
            report = Refused(f"{report['where']}: {report['refused']}")
        if isinstance(report, Refused):
            self.stop(worker)
        event: Event = report
        return event

    def stop(self, worker: Any) -> None:
        """Kill the actor."""
        self._pending.pop(worker, None)
        self._ray.kill(worker)

    def close(self) -> None:
        """Disconnect from the cluster, unless others had connected to it."""
        if self._ours:
            self._ray.shutdown()

    def _check_room(self, need: dict[str, float]) -> None:
        there = self._ray.cluster_resources()
        for name, amount in need.items():
            if there.get(name, 0.0) < amount:
                raise ValueError(
                    f"the Ray cluster has {there.get(name, 0.0):g} {name}; a worker needs "
                    f"{amount:g}. Add nodes, or choose another --device"
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
                told = "" if isinstance(error, ModuleNotFoundError) else f" ({error})"
                why = f"cpsbs cannot be imported there{told}; install version {self._version}"
                return {"where": where, "refused": why}
            if cpsbs.__version__ != self._version:
                why = (
                    f"cpsbs {cpsbs.__version__} is installed there, and {self._version} here; "
                    "install the same"
                )
                return {"where": where, "refused": why}
            from cpsbs.workers.pools import made

            try:
                make = pickle.loads(self._make)
            except Exception as error:  # a package that cpsbs needs is missing there
                return {"where": where, "refused": f"{type(error).__name__}: {error}"}
            self._worker, report = made(make, where)
            return report

        def compute(self, task: Any) -> Any:
            from cpsbs.workers.pools import outcome

            assert self._worker is not None
            return outcome(self._worker, task)

    return Actor


def _line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    return " ".join(told(error).split())[:300].rstrip(".")
