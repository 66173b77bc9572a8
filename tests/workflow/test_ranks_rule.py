"""The rule of chapters with ranks: the torchrun command in its shell, and what makes it stale."""

import json
import shlex

import pytest

from tests.workflow.conftest import MACHINE, NANO, Project

pytestmark = pytest.mark.slow

RESULT = f"results/{MACHINE}/collectives/placement~cpu/world_size~2.json"


def shell_of(project: Project) -> list[str]:
    done = project.run(f"snakemake -n -p {NANO} -- {RESULT}")
    [shell] = [line for line in done.stderr.splitlines() if "ranks.py" in line]
    return shlex.split(shell.partition("Shell command: ")[2])


def test_the_shell_holds_the_whole_torchrun_command(fresh: Project) -> None:
    shell = shell_of(fresh)
    command = shell[shell.index("torchrun") : shell.index(">")]
    assert command[1:5] == ["--nnodes", "1", "--nproc-per-node", "2"]
    program = command[command.index("-m") :]
    assert program[:3] == ["-m", "lmlab.jobs.ranks", "--point"]
    assert json.loads(program[3])["parameters"] == {"placement": "cpu", "world_size": 2}
    assert program[4:] == ["--out", RESULT]


def test_nodes_and_rendezvous_come_from_the_config(measured: Project) -> None:
    config = measured.folder / "config.yaml"
    text = config.read_text().replace("localhost:29500", "$(first_node):29400")
    config.write_text(text)
    assert set(measured.plan()) == {"report"}, "where nodes meet moves no number"
    text = text.replace('on_each_node: ""', "on_each_node: srun --ntasks-per-node=1")
    config.write_text(text.replace("nnodes: 1", "nnodes: 2"))
    shell = " ".join(shell_of(measured))
    assert "; srun --ntasks-per-node=1 /" in shell
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint $(first_node):29400"
    assert f"-- torchrun --nnodes 2 --nproc-per-node 1 {rendezvous} -m" in shell
    assert {"collectives", "data_parallel"} == set(measured.plan()) - {"report"}
