"""Workers that compute tasks: processes of this machine, or actors on a Ray cluster.

A *pool* starts workers, hands them tasks and reports what became of them (``pools``, with
``processes`` and ``cluster`` as the two kinds). A *crew* decides who does what (``crew``): it keeps
so many workers at work, gives the task of a worker that died to another one, and refuses workers
that would compute something else.

Workers compute and send results back; only the caller writes files, so that workers need no shared
disk.
"""

from cpsbs.workers.cluster import RayPool
from cpsbs.workers.crew import TRIES, Crew, in_order
from cpsbs.workers.pools import Died, Done, Event, Failed, Make, Pool, Ready, Refused, Worker
from cpsbs.workers.processes import ProcessPool

__all__ = [
    "TRIES",
    "Crew",
    "Died",
    "Done",
    "Event",
    "Failed",
    "Make",
    "Pool",
    "ProcessPool",
    "RayPool",
    "Ready",
    "Refused",
    "Worker",
    "in_order",
]
