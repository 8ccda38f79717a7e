"""Commands on a Ray cluster: the same bytes as on one machine, even if workers die."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cpsbs.text import demonstration
from tests.models.folders import causal_folder

pytest.importorskip("ray")

TEXTS = [text for text, _ in demonstration()]
DRAW = ("-k", "3", "--temperature", "0.5", "--max-length", "40", "--batch-size", "4")


def command(*arguments: str | Path) -> list[str]:
    """Return a command line of cpsbs that says nothing of this test's environment."""
    return [sys.executable, "-m", "cpsbs", *map(str, arguments)]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, encoding="utf-8", timeout=300)


def done(*arguments: str | Path) -> str:
    """Run a command that must succeed, and return what it said."""
    ended = run(*arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "english.txt"
    file.write_text("".join(f"{text}\n" for text in TEXTS * 8), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def expected(corpus: Path) -> bytes:
    """What one machine writes."""
    output = corpus.with_name("here.jsonl")
    done("sample", "-f", corpus, *DRAW, "-o", output)
    return output.read_bytes()


def test_a_cluster_started_here_writes_the_same_bytes(tmp_path: Path) -> None:
    """It starts, loads, computes and stops; the slow tests do the same with nodes that die."""
    texts = TEXTS[:6]
    done("sample", *texts, *DRAW, "-o", tmp_path / "here.jsonl")
    said = done(
        "sample", *texts, *DRAW, "--engine=ray", "--workers=1", "-o", tmp_path / "there.jsonl"
    )
    assert said.endswith(f"Wrote 6 results to {tmp_path / 'there.jsonl'}.\n")
    assert (tmp_path / "there.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()


def test_options_of_a_cluster_need_one() -> None:
    for option in ("--workers=2", "--cores=2", "--address=auto"):
        refused = run("sample", "Hello.", option)
        assert refused.returncode == 1
        assert "which needs --engine ray; give that too" in refused.stderr


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1:1", "nobody answers at 127.0.0.1:1 ("),
        ("ray://127.0.0.1:1", "run the command on a node of the cluster, with --address auto"),
    ],
)
@pytest.mark.slow
def test_a_missing_cluster_is_one_message(address: str, told: str, tmp_path: Path) -> None:
    refused = run(
        "sample", "Hello.", "--engine=ray", f"--address={address}", "-o", tmp_path / "out.jsonl"
    )
    assert refused.returncode == 1
    assert told in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


class Nodes:
    """A cluster of processes on this machine: a head without room for workers, and nodes.

    Attributes:
        address: the address of the cluster.
    """

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        self.cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.nodes = [self.cluster.add_node(num_cpus=1) for _ in range(count)]
        self.address: str = self.cluster.address

    def stop(self) -> None:
        """Stop all nodes, and the pipes to them that Ray leaves open."""
        self.cluster.shutdown()
        self.nodes.clear()
        del self.cluster
        with warnings.catch_warnings(action="ignore"):
            gc.collect()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    found = Nodes(2)
    yield found
    found.stop()


def workers(nodes: Nodes) -> list[int]:
    """Return the processes of workers of this cluster; Ray names them, and their parent its folder.

    Others may run on this machine, of another test or of somebody else.
    """
    session = Path(nodes.cluster.head_node.get_session_dir_path()).name.encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            own, above = (Path("/proc", pid, "cmdline") for pid in (folder.name, parent))
            if re.match(rb"ray::.*Actor", own.read_bytes()) and session in above.read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def started(output: Path, nodes: Nodes, corpus: Path) -> subprocess.Popen[str]:
    """Start a command on the cluster, and return it when some results are there."""
    running = subprocess.Popen(
        command(
            "sample", "-f", corpus, *DRAW, "-o", output,
            "--engine=ray", f"--address={nodes.address}", "--workers=2",
        ),
        stderr=subprocess.PIPE, encoding="utf-8",
    )  # fmt: skip
    partial, end = output.with_name(f"{output.name}.partial"), time.monotonic() + 240
    while not (partial.exists() and partial.read_bytes().count(b"\n") > 8):
        assert running.poll() is None, running.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.05)
    return running


def kill_a_worker(nodes: Nodes, running: subprocess.Popen[str]) -> None:
    before = workers(nodes)
    assert before
    os.kill(before[0], signal.SIGKILL)
    while before[0] in workers(nodes):
        time.sleep(0.01)
    assert running.poll() is None


def kill_a_node(nodes: Nodes, running: subprocess.Popen[str]) -> None:
    nodes.cluster.remove_node(nodes.nodes.pop(), allow_graceful=False)
    assert running.poll() is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.parametrize("kill", [kill_a_worker, kill_a_node])
def test_deaths_in_the_middle_cost_only_time(
    kill: Callable[[Nodes, subprocess.Popen[str]], None],
    nodes: Nodes,
    corpus: Path,
    expected: bytes,
    tmp_path: Path,
) -> None:
    output = tmp_path / "there.jsonl"
    running = started(output, nodes, corpus)
    kill(nodes, running)
    said = running.communicate(timeout=300)[1]
    assert running.returncode == 0, said
    assert output.read_bytes() == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_killed_command_resumes_with_another_number_of_workers(
    nodes: Nodes, corpus: Path, expected: bytes, tmp_path: Path
) -> None:
    output = tmp_path / "there.jsonl"
    running = started(output, nodes, corpus)
    running.kill()
    running.wait()
    assert not output.exists()
    said = done(
        "sample", "-f", corpus, *DRAW, "-o", output,
        "--engine=ray", f"--address={nodes.address}", "--workers=1",
    )  # fmt: skip
    assert "Resuming: " in said  # and perhaps a note on the wait for a worker
    assert output.read_bytes() == expected
    # And one machine takes it for its own.
    assert "already complete" in done("sample", "-f", corpus, *DRAW, "-o", output)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "arguments",
    [
        ("estimate", "entropy", "--mean"),
        ("estimate", "length", "--repeats=2"),
        ("answers",),
        ("mbr", "--candidates=beam:2"),
        ("sample", "--until-mass=0.5", "--most=9"),
    ],
)
def test_every_command_writes_the_same_bytes(
    arguments: tuple[str, ...], nodes: Nodes, tmp_path: Path
) -> None:
    (tmp_path / "texts").write_text("".join(f"{text}\n" for text in TEXTS[:9]), encoding="utf-8")
    given: list[str | Path] = [*arguments, *DRAW, "-f", tmp_path / "texts"]
    there = run(*given, "--engine=ray", f"--address={nodes.address}", "-o", tmp_path / "there")
    here = run(*given, "-o", tmp_path / "here")
    assert (there.returncode, here.returncode) == (0, 0), there.stderr + here.stderr
    assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()
    assert there.stdout == here.stdout


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_changes_on_the_way_is_one_message(nodes: Nodes, tmp_path: Path) -> None:
    """Other files than the command has seen, as on a node with another copy."""
    folder = causal_folder(tmp_path / "model")
    program = tmp_path / "program.py"
    program.write_text(
        "from cpsbs.cli import engines\n"
        "from cpsbs.__main__ import main\n"
        "engines.Engine.content = 'another'\n"
        "main()\n"
    )
    arguments = ["sample", "dog", "-k2", "--max-length=3", "--engine=ray"]
    arguments += [f"--model={folder}", f"--address={nodes.address}"]
    arguments += [f"--output={tmp_path / 'out.jsonl'}"]
    refused = subprocess.run(
        [sys.executable, program, *arguments], capture_output=True, encoding="utf-8", timeout=300
    )
    assert refused.returncode == 1
    *_, last = refused.stderr.splitlines()  # after a note on the first node
    assert last.startswith("error: no worker can be used: node ")
    assert "and another here; copy the same files there" in last
    assert not (tmp_path / "out.jsonl").exists()
