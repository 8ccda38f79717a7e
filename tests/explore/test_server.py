"""The server answers its own page, one search at a time, and nobody else."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from cpsbs.explore import server
from cpsbs.explore.explorer import Explorer
from cpsbs.explore.page import NOT_BUILT
from cpsbs.explore.scene import Scene

try:
    from cpsbs.explore.page import html

    html({"mode": "server"})
except ImportError:
    pytest.skip(NOT_BUILT, allow_module_level=True)

SCENE = Scene("the dog", k=3, max_length=5).as_record()
Ask = Callable[..., Any]


@pytest.fixture
def client(explorer: Explorer) -> Iterator[TestClient]:
    app = server.application(explorer, {"model": "tiny", "scenes": [SCENE]})
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client


def lines(answer: Any) -> list[Any]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def test_the_page_comes_with_a_policy_that_allows_its_own_script_only(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert "script-src 'sha256-" in answer.text
    assert "connect-src 'self'" in answer.text
    assert "unsafe" not in answer.text.partition("<style>")[0]
    assert answer.headers["content-security-policy"] == "frame-ancestors 'none'"
    assert answer.headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in answer.headers


def test_a_draw_reports_every_step_and_then_the_document(
    client: TestClient, explorer: Explorer
) -> None:
    found = lines(
        client.post("/api/draw", json={"scene": SCENE, "design": "stratified", "seed": 4})
    )
    *steps, last = found
    assert [line["progress"] for line in steps] == list(range(len(steps)))
    document = explorer.document(Scene.from_record(SCENE))
    explorer.draw(document, "stratified", 4)
    assert last["document"] == json.loads(json.dumps(document.as_record()))


def test_many_seeds_come_in_several_documents(client: TestClient) -> None:
    seeds = list(range(40))
    found = lines(
        client.post("/api/redraw", json={"scene": SCENE, "design": "gumbel-top-k", "seeds": seeds})
    )
    documents = [line["document"] for line in found if "document" in line]
    assert len(documents) == 2
    assert [run["seed"] for document in documents for run in document["runs"]] == seeds


def test_a_branch_begins_with_its_prefix(client: TestClient) -> None:
    body = {"scene": SCENE, "design": "stratified", "seed": 0, "prefix": [3, 4]}
    document = lines(client.post("/api/draw", json=body))[-1]["document"]
    assert all(output["tokens"][:2] == [3, 4] for output in document["outputs"])


def test_the_exact_value_is_found(client: TestClient) -> None:
    scene = {**SCENE, "max_length": 2, "function": "length"}
    document = lines(client.post("/api/exact", json={"scene": scene}))[-1]["document"]
    assert document["exact"]["captured"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("draw", {"scene": {"text": "a"}}, "design is None"),
        ("draw", {"scene": {}, "design": "top-k"}, 'with a "text"'),
        ("draw", {"scene": SCENE, "design": "top-k", "seed": 2**63}, "64-bit"),
        ("draw", {"scene": SCENE, "design": "top-k", "seed": "0"}, "64-bit"),
        ("draw", {"scene": SCENE, "design": "top-k", "prefix": ["a"]}, "64-bit"),
        ("draw", {"scene": SCENE, "design": "top-k", "prefix": [1] * 2000}, "at most 1024"),
        ("redraw", {"scene": SCENE, "design": "top-k", "seeds": []}, "1 to 1000"),
        ("redraw", {"scene": SCENE, "design": "top-k", "seeds": [1] * 1001}, "1 to 1000"),
        ("exact", {"scene": {**SCENE, "k": 10**9}}, "from 1 to 200"),
    ],
)
def test_bad_requests_are_refused_with_a_sentence(
    client: TestClient, path: str, body: Any, reason: str
) -> None:
    answer = client.post(f"/api/{path}", json=body)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"scene": SCENE, "design": "no-such"}, "design is 'no-such'"),
        ({"scene": {**SCENE, "text": " "}, "design": "top-k"}, "the text is empty"),
        ({"scene": SCENE, "design": "top-k", "prefix": [1]}, "ends the sequence"),
        ({"scene": SCENE, "design": "top-k", "prefix": [10**6]}, "from 0 to"),
    ],
)
def test_what_a_search_cannot_do_is_its_last_line(
    client: TestClient, body: Any, reason: str
) -> None:
    assert reason in lines(client.post("/api/draw", json=body))[-1]["error"]


# ---------------------------------------------------------------------- who may ask


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[::2]:80"])
def test_other_host_names_are_refused(client: TestClient, host: str) -> None:
    for answer in (
        client.get("/", headers={"Host": host}),
        client.post("/api/cancel", json={}, headers={"Host": host}),
    ):
        assert answer.status_code == 421


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1", "[::1]:80", "LOCALHOST"])
def test_names_of_this_machine_are_allowed(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_pages_of_other_origins_are_refused(client: TestClient, origin: str) -> None:
    headers = {"Origin": origin}
    assert client.post("/api/cancel", json={}, headers=headers).status_code == 403
    own = {"Origin": "http://127.0.0.1:8000"}
    assert client.post("/api/cancel", json={}, headers=own).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_forms_of_other_pages_cannot_post(client: TestClient, kind: str) -> None:
    body = json.dumps({"scene": SCENE, "design": "top-k"})
    answer = client.post("/api/draw", content=body, headers={"Content-Type": kind})
    assert answer.status_code == 415


def test_large_and_broken_bodies_are_refused(client: TestClient) -> None:
    kind = {"Content-Type": "application/json"}
    large = client.post("/api/draw", content=b" " * (server.LARGEST_BODY + 1), headers=kind)
    assert large.status_code == 413
    for broken in (b"{", b"[1]", b"\xff", b"[" * 100_000):
        assert client.post("/api/draw", content=broken, headers=kind).status_code == 400


def test_unknown_addresses_and_methods_are_refused(client: TestClient) -> None:
    assert client.get("/api/draw").status_code == 405
    assert client.get("/etc/passwd").status_code == 404
    assert client.get("/docs").status_code == 404


def test_a_token_is_needed_where_others_can_reach_the_server(explorer: Explorer) -> None:
    app = server.application(explorer, {}, None, "secret")
    with TestClient(app, base_url="http://any.example") as client:
        assert client.get("/").status_code == 403
        assert client.get("/?token=secre").status_code == 403
        assert client.post("/api/cancel", json={}).status_code == 403
        assert client.get("/?token=secret").status_code == 200
        assert client.post("/api/cancel?token=secret", json={}).status_code == 200


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "192.168.0.1", "::", "example.org")),
    ],
)
def test_loopback_is_told_from_everything_else(host: str, local: bool) -> None:
    assert server.is_loopback(host) is local


def test_a_port_that_is_taken_is_named() -> None:
    taken = pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1")
    with server.bound_socket("127.0.0.1", 0) as first, taken:
        server.bound_socket("127.0.0.1", first.getsockname()[1])


# ---------------------------------------------------------------------- one search at a time


class Slow(Explorer):
    """Waits in every search until it is told to go on, or cancelled."""

    began = threading.Event()
    most = 0
    running = 0

    def draw(
        self, document: Any, design: str, seed: int, prefix: Any = (), watch: Any = None
    ) -> None:
        Slow.running += 1
        Slow.most = max(Slow.most, Slow.running)
        try:
            Slow.began.set()  # once, or a test that clears it would take one search for the next
            for length in range(1000):
                watch(length)
                time.sleep(0.01)
        finally:
            Slow.running -= 1


def test_a_new_search_stops_the_one_before(explorer: Explorer) -> None:
    app = server.application(Slow(explorer.model), {})
    body = {"scene": SCENE, "design": "stratified", "seed": 0}
    answers: list[Any] = []
    with TestClient(app, base_url="http://127.0.0.1") as client:

        def draw() -> None:
            answers.append(lines(client.post("/api/draw", json=body)))

        first, second = threading.Thread(target=draw), threading.Thread(target=draw)
        first.start()
        assert Slow.began.wait(20)
        Slow.began.clear()
        second.start()
        first.join(20)
        assert Slow.began.wait(20)
        client.post("/api/cancel", json={})
        second.join(20)
    assert not first.is_alive()
    assert not second.is_alive()
    assert [answer[-1] for answer in answers] == [{"cancelled": True}] * 2
    assert Slow.most == 1


def test_a_page_that_is_asked_for_too_early_waits() -> None:
    """The address is printed, and a browser opened, before the server runs."""
    with server.bound_socket("127.0.0.1", 0) as bound:
        socket.create_connection(bound.getsockname(), timeout=10).close()


def test_stopping_the_server_ends_the_answer_that_is_under_way(explorer: Explorer) -> None:
    Slow.began.clear()
    body = json.dumps({"scene": SCENE, "design": "stratified"})
    with server.bound_socket("127.0.0.1", 0) as bound:
        host, port = bound.getsockname()
        running = server.PageServer(server.application(Slow(explorer.model), {}))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]})
        thread.start()
        connection = http.client.HTTPConnection(host, port, timeout=20)
        connection.request("POST", "/api/draw", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert Slow.began.wait(20)
        began = time.monotonic()
        running.should_exit = True
        *_, last = answer.read().splitlines()
        thread.join(20)
        connection.close()
    assert not thread.is_alive()
    assert json.loads(last) == {"cancelled": True}
    assert time.monotonic() - began < 10
