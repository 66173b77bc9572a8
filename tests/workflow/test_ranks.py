"""Ranks in the real workflow: the command that starts them, and what of it makes a result stale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmlab.measure.identity import find_machine
from tests.workflow.conftest import Project

pytestmark = pytest.mark.slow

RESULT = f"results/{find_machine().id}/collectives/placement~cpu/world_size~2.json"


def test_two_real_ranks_agree_on_every_case(measured_once: Project) -> None:
    result = json.loads((measured_once.folder / RESULT).read_text())
    assert result["status"] == "ok"
    assert (result["data"]["ranks"]["backend"], result["data"]["ranks"]["world_size"]) == (
        "gloo",
        2,
    )
    timed = [case for case in result["data"]["cases"] if "samples_ms" in case]
    assert {case["operation"] for case in timed} == {
        *("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    }
    for case in timed:
        assert len(case["rank_median_ms"]) == 2
        # The slowest of each repetition cannot be faster than any one rank.
        assert case["median_ms"] >= 0.999 * max(case["rank_median_ms"])


def test_the_rules_shell_shows_the_torchrun_command(fresh: Project) -> None:
    done = fresh.run(f"snakemake -n -p --config study=nano -- {RESULT}")
    shells = [line for line in done.stderr.splitlines() if "ranks.py" in line]
    assert len(shells) == 1
    assert "-- torchrun --nnodes 1 --nproc-per-node 2 --standalone " in shells[0]


def test_nodes_and_rendezvous_come_from_the_config(fresh: Project) -> None:
    fresh.edit("config.yaml", "nnodes: 1", "nnodes: 2")
    fresh.edit("config.yaml", "localhost:29500", "$(first_node):29400")
    fresh.edit("config.yaml", 'on_each_node: ""', "on_each_node: srun --ntasks-per-node=1")
    done = fresh.run(f"snakemake -n -p --config study=nano -- {RESULT}")
    [shell] = [line for line in done.stderr.splitlines() if "ranks.py" in line]
    assert "Shell command: srun --ntasks-per-node=1 /" in shell
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint $(first_node):29400"
    assert f"-- torchrun --nnodes 2 --nproc-per-node 1 {rendezvous}" in shell


def test_a_world_that_nodes_cannot_share_ends_in_one_line(fresh: Project) -> None:
    fresh.edit("config.yaml", "nnodes: 1", "nnodes: 3")
    done = fresh.run("snakemake -n --config study=nano", check=False)
    assert done.returncode != 0
    assert "world_size = 2 cannot be spread evenly over 3 nodes" in done.stderr
    assert "Traceback" not in done.stderr


def test_where_nodes_meet_makes_nothing_stale_but_their_number_does(measured: Project) -> None:
    measured.edit("config.yaml", "localhost:29500", "localhost:29501")
    assert measured.measures() == []
    measured.edit("config.yaml", "nnodes: 1", "nnodes: 2")
    assert {Path(path).parts[2] for path in measured.measures()} == {"collectives", "data_parallel"}
