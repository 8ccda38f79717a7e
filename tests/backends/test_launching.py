"""Kernels of a step are compiled side by side, and not launched meanwhile. No GPU is needed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cpsbs.designs import design_named
from cpsbs.search.recursion import Transition
from cpsbs.search.rehearsal import _prepared
from cpsbs.search.settings import SearchSettings

triton: Any = pytest.importorskip("triton")

from cpsbs.backends.triton import kernels  # noqa: E402
from cpsbs.backends.triton.backend import TRITON  # noqa: E402
from cpsbs.backends.triton.kernels import launching, numbers, poisson, reading  # noqa: E402
from cpsbs.backends.triton.workspace import Workspace  # noqa: E402
from cpsbs.conditional_poisson import bernoulli_sum  # noqa: E402
from tests.backends.test_fixed_steps import Pair, build  # noqa: E402
from tests.backends.test_fusing import few  # noqa: E402

CPU = torch.device("cpu")


class Card:
    """A card that is not there: kernels can be compiled for it, and a launch is an error."""

    def get_current_device(self) -> int:
        return 99

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, *args: Any) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            raise RuntimeError("a kernel is launched")

        return launch

    @property
    def utils(self) -> Any:
        def load_binary(*args: Any) -> tuple[int, ...]:
            return (1, 1, 0, 0, 1024)

        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": 232_448}

        return SimpleNamespace(
            load_binary=load_binary,
            get_device_properties=get_device_properties,
            unload_module=lambda module: None,
        )


@pytest.fixture(autouse=True)
def _card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if isinstance(reading._read, launching.Kernel):
        reading._read.device_caches.pop(99, None)
    monkeypatch.setattr(triton.runtime.driver, "_active", Card(), raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were asked for, in their order."""
    run, found = launching.Kernel.run, list[str]()

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = run(self, *args, **kwargs)
        found.append(self.__name__)
        return result

    monkeypatch.setattr(launching.Kernel, "run", noted)
    return found


def step(design: str) -> Any:
    """A step of a search with K = 5 from one hypothesis."""
    settings = SearchSettings(5, design_named(design), 20)
    return _prepared(Transition(settings, (0,), 1, TRITON), 1, 4000, CPU, 1, torch.float32)


@pytest.mark.parametrize("design", ["top-k", "conditional-poisson", "stratified"])
def test_all_kernels_of_a_step_are_compiled(design: str, compiled: list[str]) -> None:
    take = step(design)
    with launching.compiling_only():
        take()
    assert {"_close", "_read", "_normalize", "_choose", "_collect", "_rank", "_extend"} <= {
        *compiled
    }
    assert ("draw" in compiled) == (design != "top-k")
    assert reading._read.device_caches[99][0]
    with pytest.raises(RuntimeError, match="a kernel is launched"):
        take()


def test_a_kernel_whose_compiler_failed_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a user interrupts the first search, and thereby all compilers."""
    compile_, failed = triton.compiler.compile, list[bool]()

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        if not failed:
            failed.append(True)
            raise OSError("the compiler was interrupted")
        return compile_(*args, **kwargs)

    def launch() -> None:
        table = torch.zeros(1, 2, 16)
        reading.read_into(torch.zeros(2, 1000), 1.0, 64, table[0], table)

    monkeypatch.setattr(triton.compiler, "compile", fail_once)
    with pytest.raises(OSError, match="interrupted"), launching.compiling_only():
        launch()
    with pytest.raises(RuntimeError, match="a kernel is launched"):
        launch()


def test_other_threads_launch_meanwhile() -> None:
    errors, take = list[str](), step("top-k")

    def launch() -> None:
        try:
            take()
        except RuntimeError as error:
            errors.append(str(error))

    with launching.compiling_only():
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
        take()
    assert errors == ["a kernel is launched"]


def test_nothing_depends_on_what_was_not_written() -> None:
    place = torch.tensor([1])
    with launching.compiling_only():
        assert torch.empty(3).tolist() == [0, 0, 0]
        assert torch.empty_like(place).tolist() == [0]
        for use in (
            lambda x: x[place],
            lambda x: x.gather(0, place),
            lambda x: x.index_select(0, place),
            lambda x: x.index_add_(0, place, x[:1]),
            lambda x: x.scatter_(0, place, 1.0),
        ):
            with pytest.raises(launching.NotWrittenError, match="indices"):
                use(torch.zeros(3))
    with launching.compiling_only(indices=True):
        assert torch.empty(3)[place].tolist() == [0]
    assert torch.zeros(3)[place].tolist() == [0]


def test_tables_that_are_kept_are_right() -> None:
    """They are made when they are first asked for, which may be while kernels are compiled."""
    given = (7, 5000, CPU)
    poisson._Tables.of.cache_clear()
    bernoulli_sum.Circle.of.cache_clear()
    bernoulli_sum.tail_waves.cache_clear()
    with launching.compiling_only():
        found = poisson._Tables.of(*given)
        assert numbers.host_number.__wrapped__(0.7, CPU).tolist() == [0.7]
    bernoulli_sum.Circle.of.cache_clear()
    bernoulli_sum.tail_waves.cache_clear()
    expected = poisson._Tables.of.__wrapped__(*given)
    for field in fields(found):
        assert torch.equal(getattr(found, field.name), getattr(expected, field.name))


def test_designs_that_take_what_kernels_wrote_are_refused() -> None:
    take = step("independent")
    with pytest.raises(launching.NotWrittenError), launching.compiling_only():
        take()


@pytest.mark.parametrize("name", ["llama", "marian", "gpt2"])
@pytest.mark.parametrize("fails", [False, True])
def test_kernels_of_a_models_step_are_compiled_side_by_side(
    name: str,
    fails: bool,
    compiled: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And nothing else changes, whether that fails or not."""
    caplog.set_level(logging.DEBUG, logger="cpsbs")
    monkeypatch.setattr(kernels, "usable", lambda device: True)
    model = few("cpu", torch.float16) if name == "llama" else build(name, dtype=torch.float32)
    changed = list[str]()

    def record(self: Workspace, model: Any, window: int, strict: bool) -> None:
        self._before = self.clock.position.clone()
        kept = ("parent", "token", "limit", "offset", "place", "mask", "states", "cross")
        before = {name: getattr(self, name).clone() for name in kept}
        if fails:  # after the first of two runs
            monkeypatch.setattr(self.logits, "keep", _raise)
        self._compile(model, window)
        changed.extend(n for n, x in before.items() if not torch.equal(x, getattr(self, n)))
        if not torch.equal(self.clock.position, self._before):
            changed.append("position")
        raise RuntimeError("far enough")

    monkeypatch.setattr(Workspace, "_record", record)
    with torch.no_grad():
        assert not Pair(model, k=3).fix(8)
    assert "_advance" in compiled
    assert "attend" in compiled or "own" in compiled
    assert ("_parts" in compiled) == (name == "llama")
    assert ("are not compiled side by side" in caplog.text) == fails
    assert not changed


def _raise(logits: Any) -> None:
    raise RuntimeError("the logits are not kept")
