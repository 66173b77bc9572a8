"""Attention variants on the shapes that users have: `python -m lmlab.attention.bench`.

The shapes are those of the models (every size, context and batch) and a fixed regression set:
ragged lengths, head dimensions from 32 to 256, both masks, many short sequences and few long ones.
Inputs have the layout of a model, (batch, sequence, heads, head_dim) in memory.

Device time is the time of a CUDA graph of several calls, so the host has no part in it. The
variants of a shape alternate in random order, and a time is the median over rounds. Host time is
what a call takes to return while the device works. The result is a list of records (JSON) and a
table: ours against the best other variant and, as a geometric mean, against each of them.

The default variants are cuDNN, which the ratios in `docs/kernels.md` (forward 0.85, backward 0.79)
refer to, and FlashAttention-2. FlexAttention (`--variants flex`) compiles for seconds at every
shape; the attention chapter of the report compares it at the models' shapes.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lmlab.attention import registry
from lmlab.attention.support import why_unsupported
from lmlab.kernels.graph_clock import Call, medians_ms, record, replay_ms

OURS = "flash"
HOST_MS, HOST_CALLS = 10.0, (3, 40)
"""Time of calls for the host clock, and how few and how many they may be."""


@dataclass(frozen=True)
class Shape:
    """One self-attention problem."""

    batch: int
    heads: int
    sequence: int
    head_dim: int
    is_causal: bool = True


MODEL_HEADS = {12: 64, 16: 64, 20: 64, 25: 64, 32: 80, 36: 128}
"""Heads of the model sizes, small to 10b, and their head dimension."""
MODELS = [
    Shape(batch, heads, context, head_dim)
    for heads, head_dim in MODEL_HEADS.items()
    for context in (128, 256, 512, 1024, 2048, 4096)
    for batch in (1, 4, 16)
]
REGRESSION = [
    Shape(2, 16, 3001, 64), Shape(4, 16, 1000, 64), Shape(8, 12, 77, 64), Shape(2, 16, 3001, 128),
    Shape(4, 16, 1000, 128, False), Shape(2, 16, 1500, 64, False), Shape(4, 32, 777, 80),
    Shape(4, 16, 2048, 32), Shape(4, 16, 2048, 32, False), Shape(8, 16, 512, 96),
    Shape(2, 16, 4096, 96), Shape(4, 16, 1024, 128), Shape(16, 16, 1024, 128),
    Shape(2, 32, 4096, 128), Shape(4, 16, 2048, 128, False), Shape(2, 16, 4096, 64, False),
    Shape(4, 8, 1024, 192), Shape(2, 8, 4096, 192), Shape(4, 8, 1024, 256), Shape(1, 8, 8192, 256),
    Shape(2, 8, 2048, 256, False), Shape(128, 16, 128, 64), Shape(512, 8, 64, 64),
    Shape(64, 16, 256, 128), Shape(1, 2, 16384, 64), Shape(1, 1, 32768, 128),
    Shape(1, 16, 16384, 64), Shape(1, 16, 16384, 128), Shape(1, 16, 16384, 128, False),
]  # fmt: skip
SETS = {"models": MODELS, "regression": REGRESSION, "all": REGRESSION + MODELS}


def inputs(shape: Shape) -> list[Tensor]:
    """Random q, k, v and the gradient of the output, in bf16."""
    generator = torch.Generator("cuda").manual_seed(0)
    size = shape.batch, shape.sequence, shape.heads, shape.head_dim
    tensors = [
        torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator).transpose(1, 2)
        for _ in range(4)
    ]
    return [*(x.requires_grad_() for x in tensors[:3]), tensors[3]]


def calls(variant: str, shape: Shape, tensors: list[Tensor]) -> dict[str, Call]:
    """Forward and backward of one variant; the forward builds the graph of autograd."""
    attend = registry.load(variant)
    q, k, v, grad_o = tensors
    o = attend(q, k, v, is_causal=shape.is_causal)
    return {
        "forward": lambda: attend(q, k, v, is_causal=shape.is_causal),
        "backward": lambda: torch.autograd.grad(o, (q, k, v), grad_o, retain_graph=True),
    }


def host_us(call: Call, device_ms: float) -> float:
    """Time that a call takes to return, the device being idle at first."""
    fewest, most = HOST_CALLS
    count = max(fewest, min(most, round(HOST_MS / device_ms)))
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / count * 1e6


def measure(shape: Shape, variants: Sequence[str]) -> list[dict[str, Any]]:
    """Records of all variants at one shape, with the reason where one cannot run."""
    tensors = inputs(shape)
    q = tensors[0]
    records: list[dict[str, Any]] = []
    timed, recordings = [], []
    for variant in variants:
        labels = asdict(shape) | {"variant": variant}
        try:
            reason = why_unsupported(
                variant, device=q.device, dtype=q.dtype, head_dim=shape.head_dim
            )
            for phase, call in calls(variant, shape, tensors).items() if reason is None else ():
                recording = record(call)
                device_ms = replay_ms(recording)
                host = statistics.median(host_us(call, device_ms) for _ in range(3))
                timed.append(labels | {"phase": phase, "host_us": round(host, 1)})
                recordings.append(recording)
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
        if reason is not None:
            records.append(labels | {"reason": reason})
    for found, time_ms in zip(timed, medians_ms(recordings), strict=True):
        records.append(found | {"device_us": round(1e3 * time_ms, 2)})
    return records


def summarize(records: Iterable[dict[str, Any]]) -> str:
    """Device and host time by variant, the ratio of ours to the best other, and mean ratios; of
    each phase and, as their sum, of both."""
    table = pd.DataFrame([found for found in records if "device_us" in found])
    if table.empty:
        return "no variant runs here"
    labels = [*Shape.__dataclass_fields__, "variant"]
    both = table.groupby(labels)[["device_us", "host_us"]].sum(min_count=2).dropna()
    table = pd.concat([table, both.reset_index().assign(phase="both")])
    columns = [*Shape.__dataclass_fields__, "phase"]
    device = table.pivot(index=columns, columns="variant", values="device_us")
    host = table.pivot(index=columns, columns="variant", values="host_us").add_suffix(" host")
    others = device.drop(columns=OURS)
    ratio = (device[OURS] / others.min(axis=1)).rename("ours / best")
    lines = [pd.concat([device, ratio.round(2), host], axis=1).reset_index().to_string(index=False)]
    for phase, ratios in others.rdiv(device[OURS], axis=0).groupby("phase"):
        means = np.exp(np.log(ratios).mean()).round(3)
        pairs = ", ".join(f"{mean} of {name}" for name, mean in means.items())
        lines.append(f"{phase}, geometric mean of ours: {pairs}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a set of shapes; print the summary and write the records."""
    parser = argparse.ArgumentParser(
        prog="lmlab.attention.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", choices=SETS, default="all")
    parser.add_argument("--variants", nargs="+", default=["sdpa_cudnn", "sdpa_flash"])
    parser.add_argument("--json", type=Path, help="write the records to this file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed")
    records: list[dict[str, Any]] = []
    variants = list(dict.fromkeys([OURS, *options.variants]))
    for shape in SETS[options.shapes]:
        with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
            records += measure(shape, variants)
        torch._dynamo.reset()  # a compiled variant keeps only a few shapes
        gc.collect()
        if options.json:
            options.json.write_text(json.dumps(records, indent=1))
    print(summarize(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
