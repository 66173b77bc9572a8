"""Rank processes for tests: started once, then handed one function after the other.

Starting a process and importing torch takes seconds, a test program tens of milliseconds. So three
processes stay for the whole session. For each program as many of them as it wants form a fresh
group, which is gone when the program ends. A program that fails on one rank leaves others
waiting for it; they are ended after a short while, and the next program gets new processes.
"""

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LARGEST_WORLD = 3
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
PROGRAM_TIMEOUT_S = 120.0
GRACE_S = 2.0
"""How long other ranks have to fail as well, and say why, once one has."""


class RankFailure(AssertionError):
    """A program that raised, or a rank that ended, with rank and traceback."""


@dataclass(frozen=True)
class Job:
    """A program, and which rank of which group is to run it."""

    function: Callable[..., Any]
    keywords: dict[str, Any]
    backend: str
    store: str
    rank: int
    world_size: int


def serve(connection: Connection) -> None:
    """Life of a rank process: take a program, join its group, answer with what it returns."""
    torch.set_num_threads(1)
    while True:
        try:
            job = connection.recv_bytes()
        except EOFError:  # the session has ended
            return
        try:
            answer = (True, run_in_group(pickle.loads(job)))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


def run_in_group(job: Job) -> Any:
    """Call a function as one rank of a group."""
    torch.manual_seed(0)
    if job.backend == "nccl":
        torch.cuda.set_device(job.rank)
    dist.init_process_group(
        job.backend,
        store=dist.FileStore(job.store, job.world_size),
        rank=job.rank,
        world_size=job.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    try:
        # A rank that leaves while another is still connecting makes that one fail.
        dist.barrier()
        returned = job.function(**job.keywords)
        dist.barrier()
        return returned
    finally:
        dist.destroy_process_group()


class RankPool:
    """The processes, and what they are told."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *,
        backend: str = "gloo",
        **keywords: Any,
    ) -> list[Any]:
        """What a module-level function returns on each rank; RankFailure if it raises on one."""
        self.start()
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            for rank in range(world_size):
                job = Job(function, keywords, backend, store, rank, world_size)
                self._connections[rank].send_bytes(pickle.dumps(job))
            return self._collect(world_size)

    def start(self) -> None:
        """Have processes that wait for a program, if there are none."""
        context = multiprocessing.get_context("spawn")
        for _ in range(LARGEST_WORLD - len(self._processes)):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, world_size: int) -> list[Any]:
        """Answers of all ranks, in order."""
        rank_of = {self._connections[rank]: rank for rank in range(world_size)}
        returned: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + PROGRAM_TIMEOUT_S
        while len(returned) + len(failures) < world_size and time.monotonic() < deadline:
            open_connections = [c for c, r in rank_of.items() if r not in returned | failures]
            for connection in wait(open_connections, timeout=deadline - time.monotonic()):
                rank = rank_of[connection]
                succeeded, value = self._receive(connection)
                (returned if succeeded else failures)[rank] = value
                if not succeeded:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if len(returned) < world_size:
            self.stop()
            raise RankFailure(self._explain(failures, returned, world_size))
        return [returned[rank] for rank in range(world_size)]

    @staticmethod
    def _receive(connection: Connection) -> tuple[bool, Any]:
        try:
            succeeded, value = pickle.loads(connection.recv_bytes())
        except EOFError:
            return False, "the process ended"
        return succeeded, value

    @staticmethod
    def _explain(failures: dict[int, str], returned: dict[int, Any], world_size: int) -> str:
        silent = [r for r in range(world_size) if r not in failures and r not in returned]
        lines = [f"rank {rank} failed:\n{text}" for rank, text in sorted(failures.items())]
        return "\n".join([*lines, *([f"no answer from ranks {silent}"] if silent else [])])

    def stop(self) -> None:
        """End the processes; the next program starts new ones."""
        for process, connection in zip(self._processes, self._connections, strict=True):
            connection.close()
            process.kill()
            process.join()
        self._processes.clear()
        self._connections.clear()
