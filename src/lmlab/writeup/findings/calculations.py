"""What the calculations say, in sentences; where no batch or no number of devices is enough too."""

from __future__ import annotations

import math

import pandas as pd

from lmlab.planning import batch
from lmlab.study.results import Result
from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import calculations as frames
from lmlab.writeup.frames.collectives import asked_for
from lmlab.writeup.numbers import binary_bytes, counted, every, exact, listed, significant, times
from lmlab.writeup.tables.calculations import CHANGES, GB
from lmlab.writeup.tables.on_this_machine import measured_tokens

NOT_WORKED_OUT = "The calculations were not made."
WHOLE = "passing whole tensors around"


def findings(collected: Collected) -> dict[str, str]:
    """All findings by name."""
    found = frames.answer(collected)
    return {
        "summary": summary(found),
        "memory": memory(found),
        "sharding": sharding(found),
        "mesh": mesh(found),
        "levers": levers(found),
        "here": here(collected, found),
        "rings": rings(found),
        "rings_here": rings_here(collected),
    }


def summary(found: Result | None) -> str:
    """The model's state and the mesh's batch, for the abstract."""
    if found is None:
        return NOT_WORKED_OUT
    state, name = found.data["state_bytes"]["total"], found.settings["device_name"]
    shape, hidden = frames.mesh_of(found), found.data["mesh"]["tokens_hidden"]
    bound = (
        "never computes longer than it talks"
        if hidden is None
        else f"computes longer than it talks from {_a_device(hidden, shape.devices)} on"
    )
    return (
        f"On paper, {significant(found.data['parameters'] / 1e9)} billion parameters keep "
        f"{significant(state / 1e12)} TB of training state, and FSDP {shape.fsdp} × TP {shape.tp} "
        f"of {name} {bound}."
    )


def memory(found: Result | None) -> str:
    """State and activations."""
    if found is None:
        return NOT_WORKED_OUT
    state, per_token = found.data["state_bytes"]["total"], found.data["activation_bytes_per_token"]
    gpu = found.settings["gpu_memory_gb"]
    return (
        f"Weights, gradients and AdamW's moments take {significant(state / GB, 4)} GB, the memory "
        f"of {counted(found.data['state_devices'], 'GPU')} of {exact(gpu)} GB; each token of the "
        f"batch adds {significant(per_token / 1e6)} MB of activations, so that "
        f"{math.floor(gpu * GB / per_token):,} tokens fill a GPU of their own."
    )


def sharding(found: Result | None) -> str:
    """How many devices it takes, and which batches none is enough for."""
    if found is None:
        return NOT_WORKED_OUT
    memory_gb = found.settings["device_memory_gb"]
    told = [
        f"{row['fewest_devices']:,} for {row['tokens']:,} tokens"
        for row in found.data["batches"]
        if row["fewest_devices"] is not None
    ]
    never = [f"{row['tokens']:,}" for row in found.data["batches"] if row["fewest_devices"] is None]
    enough = f"The fewest devices of {exact(memory_gb)} GB are {listed(told)} a device."
    per_token = found.data["activation_bytes_per_token"] * (1 - found.data["activation_share"])
    limit = math.ceil(memory_gb * GB / per_token) if per_token else None
    beyond = (
        f" From {limit:,} tokens on, the activations that stay whole leave no room at all."
        if limit is not None
        else ""
    )
    none = f" No number of devices is enough for {listed(never)} tokens." if never else ""
    return f"{enough if told else ''}{none}{beyond}".strip()


def mesh(found: Result | None) -> str:
    """The batch, with messages hidden and exposed."""
    if found is None:
        return NOT_WORKED_OUT
    values, shape = found.data["mesh"], frames.mesh_of(found)
    hidden, exposed = values["tokens_hidden"], values["tokens_exposed"]
    most = significant(values["most_tensor_parallel"])
    if hidden is None:
        return (
            f"No batch makes this mesh compute-bound: tensor parallelism of {shape.tp} is more "
            f"than the {most} that hide behind the computation."
        )
    alone = (
        "no batch is enough"
        if exposed is None
        else f"{_a_device(exposed, shape.devices)} and {math.ceil(exposed):,} in all"
    )
    return (
        f"Where messages hide behind the computation, it takes {_a_device(hidden, shape.devices)}, "
        f"{math.ceil(hidden):,} in all: gathering the weights decides, since tensor parallelism "
        f"of {shape.tp} is below the {most} up to which its messages hide. Where they do not hide, "
        f"the computation must cover both: {alone}."
    )


def levers(found: Result | None) -> str:
    """Which change lowers the batch most."""
    if found is None:
        return NOT_WORKED_OUT
    before = found.data["mesh"]["tokens_hidden"]
    better = [
        row
        for row in found.data["levers"]
        if row["change"] != "none" and row["tokens"] is not None and before is not None
        if row["tokens"] < before
    ]
    if not better:
        return "None of the changes lowers the batch that is needed."
    best = min(better, key=lambda row: float(row["tokens"]))
    return (
        f"{counted(len(better), 'change')} of {len(found.data['levers']) - 1} "
        f"lower{'s' if len(better) == 1 else ''} the batch; most of all {CHANGES[best['change']]}, "
        f"to {math.ceil(best['tokens']):,} tokens, "
        f"{times(before / best['tokens'])} fewer."
    )


def here(collected: Collected, found: Result | None) -> str:
    """What the same formulas say with this machine's measured rates."""
    link = frames.link(collected)
    if found is None or link is None:
        return (
            "For this machine nothing can be said: it takes a measured bf16 matrix product and "
            "ranks on that device that exchanged tensors."
        )
    network, d_ff = link.network(link.gather), frames.blocks_of(found).d_ff
    most = batch.most_tensor_parallel(network, d_ff=d_ff)
    tensor = (
        f"tensor parallelism hides up to {significant(most)} devices"
        if most >= 2
        else "tensor parallelism hides with no batch, not even on two devices"
    )
    return (
        f"On this machine a rank does {significant(network.intensity)} operations while a byte "
        f"travels ({link.arm}), {times(network.intensity / found.data['intensity'])} those of "
        f"{found.settings['device_name']}. With many such ranks FSDP alone is compute-bound from "
        f"about {measured_tokens(network.intensity)} tokens a device on; {tensor}."
    )


def rings(found: Result | None) -> str:
    """Bytes without the reduce-scatter."""
    if found is None or not found.data["rings"]:
        return NOT_WORKED_OUT
    most = max(found.data["rings"], key=lambda row: int(row["ranks"]))
    return (
        f"A ring sends {significant(most['ring_bytes'])} times the size on "
        f"{most['ranks']} ranks, never more than twice it. Without the reduce-scatter it is "
        f"{significant(most['gather_bytes'])} times the size, "
        f"{times(most['gather_bytes'] / most['ring_bytes'])} the bytes in half the steps."
    )


def rings_here(collected: Collected) -> str:
    """Whether whole tensors would ever pay on this machine."""
    found = frames.ring_times(collected)
    several = found[~found["even_bytes"].map(math.isinf)]
    if not len(found):
        return "Without fitted all-reduces nothing is computed for this machine."
    if not len(several):
        return "With two ranks both ways send the same bytes, whole tensors in one step fewer."
    small, never = several[several["even_bytes"] > 0], several[several["even_bytes"] == 0]
    two = "With two ranks it is no slower at any size." if len(several) < len(found) else ""
    return " ".join(filter(None, [_up_to(small), _without_latency(never), two]))


def _up_to(small: pd.DataFrame) -> str:
    """Up to which sizes whole tensors pay, and what these rest on."""
    if not len(small):
        return ""
    sizes = small["even_bytes"]
    ends = dict.fromkeys(binary_bytes(round(size)) for size in (sizes.min(), sizes.max()))
    fitted = "one job" if len(small) == 1 else "one job of each set of ranks"
    return (
        f"With more than two ranks, {WHOLE} is no slower only for small ones: up to "
        f"{' to '.join(ends)}, by the latency fitted to {fitted}{_unmeasured(small)}."
    )


def _unmeasured(small: pd.DataFrame) -> str:
    """Which of these sizes are smaller than anything that was exchanged."""
    below = small[small["even_bytes"] < small["smallest_bytes"]]
    if not len(below):
        return ""
    which = (
        every(len(small), "size")
        if len(below) == len(small)
        else f"{len(below)} of these {counted(len(small), 'size')}"
    )
    lie = "lies" if len(below) == 1 else "lie"
    smallest = listed(dict.fromkeys(map(asked_for, below["smallest_bytes"])), last="or")
    return f"; {which} {lie} below {smallest}, the smallest measured"


def _without_latency(never: pd.DataFrame) -> str:
    """Sets of ranks whose line leaves no room for a latency."""
    if not len(never):
        return ""
    return (
        f"With {listed(never['arm'])}, {WHOLE} is slower at any size: the fitted latency is 0, "
        "which stands where the line would need a negative one."
    )


def _a_device(tokens: float, devices: int) -> str:
    return f"{math.ceil(tokens / devices):,} tokens a device"
