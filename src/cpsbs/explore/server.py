"""Serves the page, and the searches that it asks for, to a browser on the same machine.

Who may ask: requests must name a host that the server was started for, so that another site cannot
reach it by pointing its own name at this machine (DNS rebinding); what is posted must be JSON from
the page's own origin; and where the server listens on more than the loopback interface, every
request needs the token that stands in the printed address.

What they may ask: bodies are small, scenes have limits of their own, and one search runs at a time.
A new request cancels the one before, because the page has moved on; so does closing the page.
Answers are lines of JSON: progress, then documents, or an error.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cpsbs.explore import page
from cpsbs.explore.explorer import Cancelled, Explorer, Watch, together
from cpsbs.explore.record import Record
from cpsbs.explore.scene import Scene

LARGEST_BODY = 128 * 1024
"""The largest number of bytes that may be posted."""
MOST_SEEDS = 1000
"""The largest number of seeds of one request."""
MOST_PREFIX = 1024
"""The largest number of tokens of a prefix."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")

Work = Callable[[Watch], Iterator[Record]]
"""Draws, reports its steps, and yields documents."""


class RefusedError(Exception):
    """A request that is not answered, with the status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class Search:
    """A search that is running in its thread."""

    lines: asyncio.Queue[Record | None]
    """What it has to say; None at its end."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended: Future[None] | None = None


class SearchDesk:
    """Runs one search at a time; a new one cancels the one before."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")
        self._handover = asyncio.Lock()
        self._current: Search | None = None

    async def begin(self, work: Work) -> Search:
        """Start a search when the one before has stopped."""
        async with self._handover:
            self.cancel()
            if self._current is not None and self._current.ended is not None:
                await asyncio.wrap_future(self._current.ended)
            loop = asyncio.get_running_loop()
            search = self._current = Search(asyncio.Queue())

            def say(line: Record | None) -> None:
                loop.call_soon_threadsafe(search.lines.put_nowait, line)

            def watch(length: int) -> None:
                if search.cancelled.is_set():
                    raise Cancelled
                say({"progress": length})

            def run() -> None:
                try:
                    for document in work(watch):
                        say({"document": document})
                except Cancelled:
                    say({"cancelled": True})
                except Exception as error:  # whatever it is, the page must hear of it
                    say({"error": str(error) or type(error).__name__})
                finally:
                    say(None)

            search.ended = self._thread.submit(run)
            return search

    def cancel(self) -> None:
        """Ask the search that is running, if any, to stop at its next step."""
        if self._current is not None:
            self._current.cancelled.set()

    def close(self) -> None:
        """Stop the search that is running, and the thread for searches."""
        self.cancel()
        self._thread.shutdown(wait=True)


HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """Refuses requests that do not come from the page that this server has served."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None, token: str | None) -> None:
        self._app, self._hosts, self._token = app, hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        try:
            self._check(Request(scope))
        except RefusedError as refused:
            answer = JSONResponse({"error": str(refused)}, refused.status)
            await answer(scope, receive, send_guarded)
        else:
            await self._app(scope, receive, send_guarded)

    def _check(self, request: Request) -> None:
        named = request.headers.get("host", "")
        if self._hosts is not None and host_name(named) not in self._hosts:
            raise RefusedError(421, "this server does not answer to that host name")
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != named:
            raise RefusedError(403, "this server answers its own page only")
        given = request.query_params.get("token", "")
        if self._token is not None and not secrets.compare_digest(
            given.encode(), self._token.encode()
        ):
            raise RefusedError(403, "the address needs the token that cpsbs explore printed")


def application(
    explorer: Explorer,
    shown: Mapping[str, Any],
    hosts: frozenset[str] | None = frozenset(LOOPBACK),
    token: str | None = None,
) -> Starlette:
    """Return the server as an ASGI application.

    Args:
        explorer: what draws.
        shown: what the page begins with: texts, scene and designs.
        hosts: the host names that requests may name; None for any.
        token: what every request must have in its address; None for nothing.
    """
    desk = SearchDesk()
    document = page.html({"mode": "server", **shown}, connects=True)

    async def index(_: Request) -> Response:
        return HTMLResponse(document)

    def searching(read: Callable[[Explorer, Mapping[str, Any]], Work]) -> Any:
        async def endpoint(request: Request) -> Response:
            try:
                work = read(explorer, await posted(request))
            except RefusedError as refused:
                return JSONResponse({"error": str(refused)}, refused.status)
            except ValueError as error:
                return JSONResponse({"error": str(error)}, 400)
            search = await desk.begin(work)
            return StreamingResponse(lines_of(search), media_type="application/x-ndjson")

        return endpoint

    async def cancel(_: Request) -> Response:
        desk.cancel()
        return JSONResponse({})

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        desk.close()

    app = Starlette(
        routes=[
            Route("/", index),
            Route("/api/draw", searching(read_draw), methods=["POST"]),
            Route("/api/redraw", searching(read_redraw), methods=["POST"]),
            Route("/api/exact", searching(read_exact), methods=["POST"]),
            Route("/api/cancel", cancel, methods=["POST"]),
        ],
        middleware=[Middleware(Guard, hosts=hosts, token=token)],
        lifespan=lifespan,
    )
    app.state.desk = desk
    return app


class PageServer(uvicorn.Server):
    """A server that stops the search that is running before it waits for the answers to end.

    Args:
        app: what ``application`` returned.
    """

    def __init__(self, app: Starlette) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3))
        self._desk: SearchDesk = app.state.desk

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop, after Ctrl-C for example."""
        self._desk.cancel()
        await super().shutdown(sockets)


async def posted(request: Request) -> Mapping[str, Any]:
    """Return the object that was posted, if it is small and JSON."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise RefusedError(415, "the request must be application/json")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_BODY:
            raise RefusedError(413, f"the request has more than {LARGEST_BODY:,} bytes")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the request is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RefusedError(400, "the request must be a JSON object")
    return found


async def lines_of(search: Search) -> AsyncIterator[bytes]:
    """Yield what a search says as lines of JSON; it is cancelled if nobody listens any more."""
    try:
        while (line := await search.lines.get()) is not None:
            yield json.dumps(line, allow_nan=False).encode() + b"\n"
    finally:
        search.cancelled.set()


def read_draw(explorer: Explorer, given: Mapping[str, Any]) -> Work:
    """Return the work of ``/api/draw``: a run with its steps, below a prefix if one is given."""
    scene, design = _scene(given), _design(given)
    seed, prefix = _integers([given.get("seed", 0)], "seed"), given.get("prefix", [])
    if not isinstance(prefix, list) or len(prefix) > MOST_PREFIX:
        raise ValueError(f"prefix must be a list of at most {MOST_PREFIX} tokens")
    tokens = _integers(prefix, "prefix")

    def work(watch: Watch) -> Iterator[Record]:
        document = explorer.document(scene)
        explorer.draw(document, design, seed[0], tokens, watch)
        yield document.as_record()

    return work


def read_redraw(explorer: Explorer, given: Mapping[str, Any]) -> Work:
    """Return the work of ``/api/redraw``: runs of many seeds, some in each document."""
    scene, design, seeds = _scene(given), _design(given), given.get("seeds")
    if not isinstance(seeds, list) or not 0 < len(seeds) <= MOST_SEEDS:
        raise ValueError(f"seeds must be a list of 1 to {MOST_SEEDS} integers")
    numbers, each = _integers(seeds, "seeds"), together(scene)

    def work(watch: Watch) -> Iterator[Record]:
        for first in range(0, len(numbers), each):
            document = explorer.document(scene)
            explorer.redraw(document, design, numbers[first : first + each], watch)
            yield document.as_record()

    return work


def read_exact(explorer: Explorer, given: Mapping[str, Any]) -> Work:
    """Return the work of ``/api/exact``: certain bounds of E f, as narrow as can be had."""
    scene = _scene(given)

    def work(watch: Watch) -> Iterator[Record]:
        document = explorer.document(scene)
        explorer.exact(document, watch)
        yield document.as_record()

    return work


def _scene(given: Mapping[str, Any]) -> Scene:
    return Scene.from_record(given.get("scene", {}))


def _design(given: Mapping[str, Any]) -> str:
    design = given.get("design")
    if not isinstance(design, str):
        raise ValueError(f"design is {design!r}; it must be the name of a design")
    return design


def _integers(values: list[Any], name: str) -> list[int]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
            raise ValueError(f"{name} has {value!r}; it must be a 64-bit integer")
    return values


def host_name(named: str) -> str:
    """Return the host of a Host header, without its port and brackets."""
    if named.startswith("["):
        return named[1:].partition("]")[0]
    return named.partition(":")[0].lower()


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server on that host."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens there; port 0 is any that is free.

    Raises:
        OSError: if that is not possible, naming the address.
    """
    problem = f"cannot listen on {host}, port {port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(f"{problem}: {error.strerror or error}") from error
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()  # a browser that is faster than the server waits, instead of being refused
    except OSError as error:
        bound.close()
        raise OSError(f"{problem}: {error.strerror or error}") from error
    return bound
