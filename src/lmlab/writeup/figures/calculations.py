"""Figures of the chapter on paper: memory over devices, and what a block waits for over batches."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lmlab.planning import batch, memory
from lmlab.planning.batch import Mesh, Network
from lmlab.study.results import Result
from lmlab.writeup import style
from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import Drawing
from lmlab.writeup.frames import calculations as frames
from lmlab.writeup.numbers import exact

GB = 1e9
DEVICES = (8, 1024)
PARTS = {
    "compute": "compute",
    "weights": "gather the weights (FSDP)",
    "activations": "exchange activations (TP)",
}


def figures(collected: Collected) -> dict[str, Drawing]:
    """Both figures; the second has a panel of this machine where it was measured."""
    found, link = frames.answer(collected), frames.link(collected)
    device = found.settings["device_name"] if found else ""
    networks: dict[str, tuple[Network, Mesh]] = {}
    if found is not None:
        networks[device] = (frames.network_of(found), frames.mesh_of(found))
        if link is not None:
            shape = frames.mesh_of(found)
            here = Mesh(fsdp=shape.fsdp, tp=shape.tp)  # one axis: what was measured
            ranks = f"{shape.devices} ranks as fast as this machine's"
            networks[ranks] = (link.network(link.gather), here)
    return {
        "memory": Drawing(
            alt="Bytes on each device against the number of devices that share the training state",
            caption=f"Lines by the tokens of each device; both axes are logarithmic. The grey "
            f"line is the memory of a device ({device}).",
            draw=(lambda: _draw_memory(found)) if found else None,
        ),
        "batch": Drawing(
            alt="Forward time of one block by its parts against the tokens of each device",
            caption="Compute-bound where computing is the highest line; the grey line marks the "
            "batch from which it is, where there is one. Both axes are logarithmic."
            f"{_whose(link)}",
            draw=(lambda: _draw_batches(found, networks)) if found else None,
        ),
    }


def _whose(link: frames.Link | None) -> str:
    """Whose rates the second panel takes."""
    return "" if link is None else f" This machine's ranks: {link.arm}."


def _draw_memory(found: Result) -> Figure:
    figure, (axis,) = style.panels(1, 1, height=3.2)
    blocks, share = frames.blocks_of(found), found.data["activation_share"]
    state = memory.training_state(blocks).total
    devices = np.unique(np.geomspace(*DEVICES, 60).round().astype(int))
    for index, row in enumerate(found.data["batches"]):
        held = [
            memory.sharded_bytes(state, row["activation_bytes"], int(count), share=share) / GB
            for count in devices
        ]
        look = style.series(index)
        axis.plot(devices, held, label=f"{row['tokens']:,} tokens a device", markevery=9, **look)
    limit = found.settings["device_memory_gb"]
    axis.axhline(limit, color=style.GUIDE, linewidth=1)
    axis.annotate(f"{exact(limit)} GB", (DEVICES[0], limit), xytext=(2, 3),
                  textcoords="offset points", fontsize=8, color="#555555")  # fmt: skip
    axis.set_xlabel("Devices N")
    axis.set_ylabel("Memory of each device (GB)")
    style.log_axis(axis, "x", ticks=[8, 16, 32, 64, 128, 256, 512, 1024])
    style.log_axis(axis, "y")
    style.legend_below(figure, axis)
    return figure


def _draw_batches(found: Result, networks: dict[str, tuple[Network, Mesh]]) -> Figure:
    figure, axes = style.panels(1, len(networks), height=3.2)
    for axis, (name, (network, mesh)) in zip(axes, networks.items(), strict=True):
        _draw_parts(axis, found, network, mesh)
        axis.set_title(f"{name}\nFSDP {mesh.fsdp} × TP {mesh.tp}")
        axis.set_xlabel("Tokens a device")
        axis.set_ylabel("Forward of one block (ms)")  # panels have scales of their own
    style.legend_below(figure, axes[0])
    return figure


def _draw_parts(axis: Axes, found: Result, network: Network, mesh: Mesh) -> None:
    blocks = frames.blocks_of(found)
    hidden = batch.tokens_when_hidden(network, mesh, d_ff=blocks.d_ff)
    alone = batch.tokens_for_weights(network, mesh) / mesh.devices
    tokens = np.geomspace(alone / 100, alone * 100, 40)
    times = [
        batch.block_times(
            network, mesh, d_model=blocks.d_model, d_ff=blocks.d_ff, tokens=count * mesh.devices
        )
        for count in tokens
    ]
    for index, (part, label) in enumerate(PARTS.items()):
        values = [1e3 * getattr(each, part) for each in times]
        axis.plot(tokens, values, label=label, markevery=6, **style.series(index))
    if hidden is not None:
        axis.axvline(hidden / mesh.devices, color=style.GUIDE, linewidth=1)
    style.log_axis(axis, "x")
    style.log_axis(axis, "y")
