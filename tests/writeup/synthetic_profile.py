"""Synthetic profiles: a host that launches at a pace, a device that multiplies and moves at a rate.

The launches go through the same frames and the same reduction as a real trace, so a page made from
them has every number that a real one has. Layers past the fourth are left out and the others made
longer instead: the totals stay right and a study of twenty points is built in a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from lmlab.experiments.trace_data import of_trace
from lmlab.measure.trace.attribution import Calls, Ranges, Work, assemble
from lmlab.measure.trace.frames import Coded
from lmlab.model.attention_cost import attention_parts
from lmlab.model.shape import ModelShape
from lmlab.study.points import Point
from lmlab.study.results import Result
from tests.writeup import factory

MOST_LAYERS = 4
UNMARKED = "void at::native::elementwise_kernel<128, 2, at::native::{}>(int, T3)"
ON_GPU = {
    "matmul": "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_"
    "aligna4_alignc4_execute_kernel__5x_cublas",
    "matmul backward": "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(Params)",
    "bmm": "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x128_8x4_nn_align1>(T1::Params)",
    "scale": "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<float, "
    "float, float, at::native::binary_internal::MulFunctor<float>>>(int, T2, T3)",
    "mask": UNMARKED.format("masked_fill_kernel(at::TensorIterator)"),
    "softmax": "void <unnamed>::softmax_warp_forward<float, float, float, 10, 0, 0>(T2 *, int)",
    "add": "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
    "(int, T2, T3)",
    "mul": "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, "
    "float, float, at::native::binary_internal::MulFunctor<float>>>(int, T2, T3)",
    "norm": "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::"
    "MeanOps<float, float, float, float>>>(T3)",
    "copy": UNMARKED.format("direct_copy_kernel_cuda(at::TensorIteratorBase &)"),
    "lerp": UNMARKED.format("lerp_scalar_kernel(at::TensorIteratorBase &)"),
}
ON_CPU = {
    "matmul": "aten::mm", "matmul backward": "aten::mm", "bmm": "aten::bmm", "scale": "aten::mul",
    "mask": "aten::masked_fill_", "softmax": "aten::_softmax", "add": "aten::add",
    "mul": "aten::mul", "norm": "aten::mean", "copy": "aten::copy_", "lerp": "aten::lerp_",
}  # fmt: skip
NAMES = {"cuda": ON_GPU, "cpu": ON_CPU}
PACE_NS = {"cuda": 45_000, "cpu": 3_000}
FLOPS_PER_NS = {"cuda": 45_000.0, "cpu": 60.0}
BYTES_PER_NS = {"cuda": 3_800.0, "cpu": 10.0}
TOOLS = {"cuda": "torch profiler 2.13.0", "cpu": "torch profiler 2.13.0"}


class Machine:
    """Launches kernels in order and keeps what a profiler would have seen."""

    def __init__(self, shape: ModelShape, device: str) -> None:
        self.shape, self.device, self.names = shape, device, NAMES[device]
        self.layers = min(shape.num_layers, MOST_LAYERS)
        self.stretch = shape.num_layers / self.layers
        self.host = self.idle_from = 0
        self.work: list[tuple[str, int, int]] = []
        self.calls: list[tuple[str, int, int]] = []
        self.ranges: list[tuple[str, int, int]] = []

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        start = self.host
        yield
        self.ranges.append((name, start, self.host))
        self.host += 500

    def launch(self, what: str, *, flops: float = 0, moved: float = 0) -> None:
        ns = max(flops / FLOPS_PER_NS[self.device], moved / BYTES_PER_NS[self.device])
        duration = round((ns + 1_500) * self.stretch)
        self.calls.append(("cudaLaunchKernel", self.host, 4_000))
        start = max(self.idle_from, self.host + 6_000)
        self.work.append((self.names[what], start, duration))
        self.idle_from = start + duration
        pace = PACE_NS[self.device] * self.stretch
        self.host = round(self.host + pace) if self.device == "cuda" else self.idle_from

    def synchronize(self) -> None:
        if self.device == "cuda":
            wait = max(self.idle_from - self.host, 2_000)
            self.calls.append(("cudaDeviceSynchronize", self.host, wait))
            self.host += wait

    def linear(self, outputs: int, inputs: int, what: str = "matmul") -> None:
        self.launch(what, flops=2 * self.shape.tokens * outputs * inputs)

    def pointwise(self, what: str, numbers: int, tensors: int = 3) -> None:
        self.launch(what, moved=4 * tensors * numbers)

    def forward(self) -> None:
        shape, stream = self.shape, self.shape.tokens * self.shape.d_model
        for layer in range(self.layers):
            with self.range(f"layers.{layer}"):
                self.pointwise("norm", stream)
                for _ in range(3):
                    self.linear(shape.d_model, shape.d_model)
                self.pointwise("mul", 2 * stream)
                with self.range("attention"):
                    self.attention()
                self.linear(shape.d_model, shape.d_model)
                self.pointwise("add", stream)
                self.pointwise("norm", stream)
                for _ in range(2):
                    self.linear(shape.d_ff, shape.d_model)
                self.pointwise("mul", shape.tokens * shape.d_ff)
                self.linear(shape.d_model, shape.d_ff)
                self.pointwise("add", stream)

    def attention(self) -> None:
        scores, product = self.shape.scores, 2 * self.shape.scores * self.shape.head_dim
        with self.range("scores"):
            self.pointwise("copy", self.shape.tokens * self.shape.d_model, 2)
            self.launch("bmm", flops=product)
        with self.range("softmax"):
            self.pointwise("scale", scores, 2)
            self.pointwise("mask", scores, 2)
            self.pointwise("softmax", scores, 2)
        with self.range("output"):
            self.launch("bmm", flops=product)

    def backward(self) -> None:
        shape, stream = self.shape, self.shape.tokens * self.shape.d_model
        per_layer = 2 * (4 * shape.d_model**2 + 3 * shape.d_model * shape.d_ff) * shape.tokens
        for _ in range(self.layers):
            for _ in range(14):
                self.launch("matmul backward", flops=per_layer / 7)
            for _ in range(4):
                self.launch("bmm", flops=2 * shape.scores * shape.head_dim)
            for _ in range(4):
                self.pointwise("mul", shape.scores, 3)
            for _ in range(12):
                self.pointwise("add", stream)

    def optimizer(self) -> None:
        for _ in range(self.layers):
            for _ in range(7):
                weights = 4 * self.shape.d_model**2 + 3 * self.shape.d_model * self.shape.d_ff
                self.pointwise("lerp", weights)

    def run(self, mode: str) -> None:
        with self.range(f"mode {mode}"):
            if mode == "train_step":
                with self.range("zero_grad"):
                    pass
            with self.range("forward"):
                self.forward()
            if mode != "forward":
                with self.range("backward"):
                    self.backward()
            if mode == "train_step":
                with self.range("optimizer"):
                    self.optimizer()
            self.synchronize()


def profile(point: Point, device: str = "cuda", **changes: Any) -> Result:
    """A point of the profile chapter; `changes` replace keys of its data."""
    shape = _shape(point)
    data, clock_ms = _recorded(shape, device)
    samples = [clock_ms * (1 + 0.003 * step) for step in range(point.settings["steps"])]
    costs = attention_parts(shape, element_bytes=4)
    return factory.result(
        point,
        device,
        measurements={"forward": factory.measurement(samples)},
        data={
            **data,
            "tool_note": None,
            "tokens_per_step": shape.tokens,
            "parameters_total": shape.num_layers * 12 * shape.d_model**2,
            "attention_cost": {name: vars(cost) for name, cost in costs.items()},
            "autocast": False,
            "tf32": False,
            "threads": 2,
            **changes,
        },
    )


def corners(point: Point, device: str = "cuda") -> Result | None:
    """The same for a few points alone, where all would take a test too long."""
    few = point.parameters["size"] in ("small", "2.7b", "cpu-small", "cpu-large")
    ends = (128, 1024) if device == "cuda" else (64, 256)
    return profile(point, device) if few and point.parameters["context"] in ends else None


def _shape(point: Point) -> ModelShape:
    keys = ("vocab_size", "context", "batch", "d_model", "d_ff", "num_layers", "num_heads")
    asked = {**point.settings, **point.parameters}
    return ModelShape(**{key: asked[key] for key in keys})


@lru_cache(maxsize=64)
def _recorded(shape: ModelShape, device: str) -> tuple[dict[str, Any], float]:
    """The data of a trace, and what the host's clock would say of its forward pass."""
    machine = Machine(shape, device)
    for mode in ("forward", "forward_backward", "train_step"):
        machine.run(mode)
    data = of_trace(_trace(machine))
    forward = data["modes"]["forward"]
    launching = forward["kernels"] * 0.8 * PACE_NS[device] * machine.stretch
    return data, max(forward["busy_ns"], launching) / 1e6 + 0.05


def _trace(machine: Machine) -> Any:
    launches = [row for row, call in enumerate(machine.calls) if "Launch" in call[0]]

    def column(rows: list[tuple[str, int, int]], index: int) -> Any:
        return np.array([row[index] for row in rows], dtype=np.int64)

    def filled(rows: list[Any], value: int) -> Any:
        return np.full(len(rows), value, dtype=np.int64)

    work, calls, ranges = machine.work, machine.calls, machine.ranges
    return assemble(
        Work(
            names=Coded.of([row[0] for row in work]),
            kinds=Coded(filled(work, 0), ["kernel" if machine.device == "cuda" else "op"]),
            start_ns=column(work, 1),
            duration_ns=column(work, 2),
            stream=filled(work, 7),
            device=filled(work, 0),
            process=filled(work, 1),
            correlation=np.array(launches, dtype=np.int64),
        ),
        Calls(
            names=Coded.of([row[0] for row in calls]),
            start_ns=column(calls, 1),
            duration_ns=column(calls, 2),
            thread=filled(calls, 1),
            process=filled(calls, 1),
            correlation=np.arange(len(calls), dtype=np.int64),
        ),
        Ranges(
            names=Coded.of([row[0] for row in ranges]),
            start_ns=column(ranges, 1),
            end_ns=column(ranges, 2),
            thread=filled(ranges, 1),
            process=filled(ranges, 1),
        ),
        TOOLS[machine.device],
    )
