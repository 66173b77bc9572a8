"""An export as nsys would write it for a profile point: three modes of a two-layer model.

The host launches every 10 us and the device is slower, so the device is never idle within a mode.
Backward is launched by the autograd thread, the optimizer runs one of the model's own elementwise
kernels, and each mode ends with a synchronize. Kernel times are round numbers that tests can add.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.measure.trace.export_builder import ExportBuilder

US = 1000
LAUNCH_EVERY = 10 * US
LAYERS = 2

SGEMM = "ampere_sgemm_128x64_tn"
SGEMM_BACKWARD = "ampere_sgemm_64x32_sliced1x4_nt"
BMM = "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x128_8x4_nt_align1>(T1::Params)"
SCALE = "void at::native::vectorized_elementwise_kernel<4, AUnaryFunctor<MulFunctor>>(int, T2, T3)"
FILL = "void at::native::elementwise_kernel<128, 4, masked_fill_kernel(at::TensorIterator)>(int)"
SOFTMAX = "void <unnamed>::softmax_warp_forward<float, float, float, 9, 0, 0>(T2 *, const T1 *)"

DURATION_US = {SGEMM: 400, SGEMM_BACKWARD: 700, BMM: 100, SCALE: 30, FILL: 20, SOFTMAX: 50}
FORWARD_US = LAYERS * (2 * 400 + 2 * 100 + 30 + 20 + 50)
BACKWARD_US = 4 * LAYERS * 700
OPTIMIZER_US = 3 * 30


class Recorder:
    """Writes launches one after the other, and their kernels on one stream."""

    def __init__(self, builder: ExportBuilder) -> None:
        self.builder = builder
        self.host = self.device = self.correlation = 0

    def launch(self, *kernels: str, thread: int = 1) -> None:
        for kernel in kernels:
            self.correlation += 1
            end = self.host + 5 * US
            call = ("cudaLaunchKernel_v7000", self.host, end, self.correlation)
            self.builder.call(*call, thread=thread)
            start = max(self.device, self.host + 8 * US)
            self.device = start + DURATION_US[kernel] * US
            self.builder.kernel(kernel, start, self.device, self.correlation)
            self.host += LAUNCH_EVERY

    def synchronize(self) -> None:
        self.correlation += 1
        end = self.device + US
        self.builder.call("cudaDeviceSynchronize_v3020", self.host, end, self.correlation)
        self.host = end

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        start = self.host
        yield
        self.builder.range(name, start, self.host, event=60)
        self.host += US

    def forward(self) -> None:
        parts = {"scores": [BMM], "softmax": [SCALE, FILL, SOFTMAX], "output": [BMM]}
        with self.range("forward"):
            for layer in range(LAYERS):
                with self.range(f"layers.{layer}"):
                    self.launch(SGEMM)
                    with self.range("attention"):
                        for part, kernels in parts.items():
                            with self.range(part):
                                self.launch(*kernels)
                    self.launch(SGEMM)

    def backward(self) -> None:
        with self.range("backward"):
            self.launch(*[SGEMM_BACKWARD] * 4 * LAYERS, thread=2)


def write_export(path: Path) -> None:
    with ExportBuilder(path) as builder:
        run = Recorder(builder)
        with run.range("mode forward"):
            run.forward()
            run.synchronize()
        with run.range("mode forward_backward"):
            run.forward()
            run.backward()
            run.synchronize()
        with run.range("mode train_step"):
            with run.range("zero_grad"):
                pass
            run.forward()
            run.backward()
            with run.range("optimizer"):
                run.launch(SCALE, SCALE, SCALE)
            run.synchronize()
