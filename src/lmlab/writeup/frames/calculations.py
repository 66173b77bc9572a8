"""The chapter on paper: its answers, and the same formulas with what this machine was measured at.

The machine's part takes two measured numbers: the bf16 matrix products of the machine card, and the
bus bandwidth of the largest exchange among the collectives. Only ranks on the device that the card
is of count, and ranks that share a device share its rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lmlab.planning import batch, rings
from lmlab.planning.batch import Mesh, Network
from lmlab.planning.memory import Blocks
from lmlab.study.results import Result
from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import collectives
from lmlab.writeup.places import extreme

PRECISION = "bf16"
GATHER, REDUCE = "all_gather", "all_reduce"
RING_SIZE_BYTES = 64 * 2**20
RING_COLUMNS = [
    "arm", "dtype", "step_ms", "bus_gb_per_s", "ring_ms", "gather_ms", "even_bytes",
    "smallest_bytes",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Link:
    """What one rank computes and how fast it reaches the others, as measured."""

    arm: str
    matmul_tflops: float
    """A rank's share of the device's rate."""
    gather: pd.Series
    """The largest all-gather."""
    reduce: pd.Series
    """The largest all-reduce."""

    def network(self, case: pd.Series) -> Network:
        """Rank and connection, by the bandwidth of one exchange."""
        return Network(
            flops_per_s=1e12 * self.matmul_tflops, bytes_per_s=1e9 * float(case["bus_gb_per_s"])
        )


def answer(collected: Collected) -> Result | None:
    """The chapter's one result, if there is one."""
    found = [row.result for row in collected.rows if row.status == "ok"]
    return found[0] if found else None


def blocks_of(result: Result) -> Blocks:
    """The model of the question."""
    return Blocks(**{key: result.settings[key] for key in ("d_model", "d_ff", "num_blocks")})


def mesh_of(result: Result) -> Mesh:
    """The devices of the question."""
    return Mesh(**{key: result.settings[key] for key in ("fsdp", "tp", "fsdp_axes", "tp_axes")})


def network_of(result: Result) -> Network:
    """A device of the question and its connection."""
    settings = result.settings
    return Network(
        flops_per_s=settings["device_flops_per_s"], bytes_per_s=settings["device_bytes_per_s"]
    )


def link(collected: Collected) -> Link | None:
    """The ranks of this machine that reach each other fastest; None where nothing says."""
    matmul = collected.ceiling("ceilings", "matmul_tflops", PRECISION, "tflops")
    data = collectives.measured(collectives.frame(collected.beside.get("collectives", ())))
    here = data[data["device"].eq(collected.device) & data["bus_gb_per_s"].notna()]
    gathers, reduces = (_largest(collectives.of(here, operation=op)) for op in (GATHER, REDUCE))
    both = gathers[gathers["arm"].isin(set(reduces["arm"]))]
    if matmul is None or not len(both):
        return None
    gather = extreme(both, "bus_gb_per_s", largest=True)
    devices = max(int(gather["gpus"]), 1)
    return Link(
        arm=str(gather["arm"]),
        matmul_tflops=float(matmul) * devices / int(gather["world_size"]),
        gather=gather,
        reduce=collectives.of(reduces, arm=gather["arm"]).iloc[0],
    )


def _largest(data: pd.DataFrame) -> pd.DataFrame:
    """The largest exchange of every set of ranks, in bf16 where it was measured."""
    wide = data.assign(preferred=data["dtype"].eq(PRECISION))
    ordered = wide.sort_values(["preferred", "size_bytes"], kind="stable")
    return ordered.groupby("arm", sort=False).tail(1)


def batches_here(found: Link, mesh: Mesh, d_ff: int) -> pd.DataFrame:
    """Tokens a device from which each way of splitting computes longer than it talks."""
    gather, reduce = found.network(found.gather), found.network(found.reduce)
    hidden = batch.tokens_when_hidden(gather, Mesh(fsdp=mesh.fsdp, tp=mesh.tp), d_ff=d_ff)
    rows = [
        ("dp", "B/N > C/W of the all-reduce", reduce.intensity),
        ("fsdp", "B/N > C/W of the all-gather", gather.intensity),
        (
            "mesh",
            "B/N > C/(W Y) and Y < F/(C/W)",
            None if hidden is None else hidden / mesh.devices,
        ),
        ("best", "B/N > C/W · min(1, (C/W)/F)", batch.fewest_tokens_a_device(gather, d_ff=d_ff)),
    ]
    return pd.DataFrame(rows, columns=["way", "formula", "tokens_a_device"])


def ring_times(collected: Collected) -> pd.DataFrame:
    """Both ways to all-reduce, by the fitted latency and bandwidth of every set of ranks."""
    data = collectives.frame(collected.beside.get("collectives", ()))
    lines = collectives.of(collectives.fits(data), operation=REDUCE)
    timed = collectives.of(collectives.measured(data), operation=REDUCE)
    records = []
    for arm in collectives.order(lines[lines["world_size"] > 1], "arm"):
        line = collectives.of(lines, arm=arm).iloc[0]
        ranks = int(line["world_size"])
        path: Mapping[str, Any] = {
            "latency_s": line["latency_ms"] / 1e3 / rings.ring_steps(ranks),
            "bytes_per_s": 1e9 * line["bus_gb_per_s"],
        }
        sent, around = (
            count(RING_SIZE_BYTES, ranks) for count in (rings.ring_bytes, rings.gather_bytes)
        )
        records.append(
            {
                "arm": arm,
                "dtype": line["dtype"],
                "step_ms": 1e3 * path["latency_s"],
                "bus_gb_per_s": line["bus_gb_per_s"],
                "ring_ms": 1e3 * rings.seconds(sent, rings.ring_steps(ranks), **path),
                "gather_ms": 1e3 * rings.seconds(around, rings.gather_steps(ranks), **path),
                "even_bytes": rings.even_size(ranks, **path),
                "smallest_bytes": _smallest(timed, line),
            }
        )
    return pd.DataFrame(records, columns=RING_COLUMNS)


def _smallest(timed: pd.DataFrame, line: pd.Series) -> float:
    """The smallest exchange that a line was fitted to."""
    return float(collectives.of(timed, arm=line["arm"], dtype=line["dtype"])["size_bytes"].min())
