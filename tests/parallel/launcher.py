"""Rank processes for tests, started once and used for many programs.

Starting a process and importing torch takes seconds, a test program milliseconds. So three
processes run for the whole session, and a process group is reused until a program needs another
world size or backend. If a program fails on one rank, the others may wait for it forever; all
processes are then killed, and the next program gets new ones.
"""

import functools
import gc
import importlib
import inspect
import itertools
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

LARGEST_WORLD = 3
COLLECTIVE_TIMEOUT = timedelta(seconds=240)
PROGRAM_TIMEOUT_S = 300.0
GRACE_S = 2.0
"""How long the other ranks have to report their errors once one has failed."""


class RankFailure(AssertionError):
    """A program raised or a rank died, with tracebacks by rank."""


def serve(connection: Connection) -> None:
    """Main loop of a rank process: receive a program, run it, send its result."""
    torch.set_num_threads(1)
    joined: dict[str, Any] = {}
    while True:
        try:
            received = connection.recv_bytes()
        except EOFError:  # the session has ended
            return
        try:
            function, kwargs, group = pickle.loads(received)
            if group != joined:
                join_group(**group)
                joined = group
                gc.freeze()  # modules, which measuring would look through at every collection
            torch.manual_seed(0)
            answer = (True, function(**kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


def join_group(backend: str, store: str, rank: int, world_size: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    if backend == "nccl":
        torch.cuda.set_device(rank)
    files = dist.FileStore(store, world_size)
    dist.init_process_group(
        backend, store=files, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )
    dist.barrier()


class RankPool:
    """Runs functions as ranks."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory()
        self._stores = (f"{self._folder.name}/{number}" for number in itertools.count())
        self._group: tuple[int, str] | None = None
        self._store = ""

    def run(
        self, function: Callable[..., Any], world_size: int, *, backend: str = "gloo", **kwargs: Any
    ) -> list[Any]:
        """What a module-level function returns on each rank; RankFailure if it raises on one."""
        self._start()
        if self._group != (world_size, backend):
            self._group, self._store = (world_size, backend), next(self._stores)
        group = {"backend": backend, "store": self._store, "world_size": world_size}
        for rank in range(world_size):
            program = function, kwargs, {**group, "rank": rank}
            self._connections[rank].send_bytes(pickle.dumps(program))
        return self._collect(world_size)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for _ in range(LARGEST_WORLD - len(self._processes)):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, world_size: int) -> list[Any]:
        """Results of all ranks, in order."""
        rank_of = {self._connections[rank]: rank for rank in range(world_size)}
        returned: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + PROGRAM_TIMEOUT_S
        while rank_of and time.monotonic() < deadline:
            for connection in wait(list(rank_of), timeout=deadline - time.monotonic()):
                try:
                    succeeded, value = pickle.loads(connection.recv_bytes())
                except EOFError:
                    succeeded, value = False, "the process died"
                (returned if succeeded else failures)[rank_of.pop(connection)] = value
                if not succeeded:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if len(returned) < world_size:
            self.stop()
            errors = [f"rank {rank} failed:\n{text}" for rank, text in sorted(failures.items())]
            raise RankFailure("\n".join([*errors, f"no answer from ranks {[*rank_of.values()]}"]))
        return [returned[rank] for rank in range(world_size)]

    def stop(self) -> None:
        """Kill the processes; the next program starts new ones."""
        for process, connection in zip(self._processes, self._connections, strict=True):
            connection.close()
            process.kill()
            process.join()
        self._processes.clear()
        self._connections.clear()
        self._group = None


def on_ranks(*world_sizes: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test function on every rank of a group, once per world size."""

    def decorate(program: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(program)
        def test(ranks: RankPool, world_size: int, **kwargs: Any) -> None:
            ranks.run(run_test, world_size, test=(program.__module__, program.__name__), **kwargs)

        names = ("ranks", "world_size")
        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        parameters = [*inspect.signature(program).parameters.values(), *added]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        ids = [f"{world_size}_ranks" for world_size in world_sizes]
        return pytest.mark.parametrize("world_size", world_sizes, ids=ids)(test)

    return decorate


def run_test(test: tuple[str, str], **kwargs: Any) -> None:
    module, name = test
    getattr(importlib.import_module(module), name).__wrapped__(**kwargs)
