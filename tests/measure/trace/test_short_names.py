"""Kernel names as tables print them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmlab.measure.trace.short_names import MAX_LENGTH, shorten

NATIVE = "void at::native::"
UNNAMED = f"{NATIVE}(anonymous namespace)::"
ITERATOR = "(at::TensorIteratorBase &)::[lambda() (instance 2)]::operator ()() const"

EXAMPLES = {
    "ampere_sgemm_128x64_tn": "ampere_sgemm_128x64_tn",
    f"{NATIVE}vectorized_elementwise_kernel<(int)4, at::native::exp_kernel_cuda{ITERATOR}>(int)": (
        "vectorized_elementwise_kernel<exp>"
    ),
    f"{NATIVE}vectorized_elementwise_kernel<4, {UNNAMED}silu_backward_kernel(at::T&)>(int)": (
        "vectorized_elementwise_kernel<silu_backward>"
    ),
    f"{NATIVE}vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<float, float, float,"
    " at::native::binary_internal::MulFunctor<float> >, std::array<char*, 2ul> >(int)": (
        "vectorized_elementwise_kernel<mul scalar>"
    ),
    f"{NATIVE}elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<"
    "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::DivFunctor<float>>"
    ">(at::TensorIteratorBase &, const T1 &)::[lambda(int) (instance 1)]>(int, T3)": (
        "elementwise_kernel<div>"
    ),
    f"{NATIVE}elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<"
    f"at::native::direct_copy_kernel_cuda{ITERATOR}>(int, T3)": "elementwise_kernel<direct_copy>",
    f"{NATIVE}reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, at::native::MaxOps<float>"
    ", unsigned int, float, (int)4>>(T3)": "reduce_kernel<max>",
    f"{UNNAMED}softmax_warp_forward<float, float, float, 8, false, false>(float*)": (
        "softmax_warp_forward"
    ),
    f"{UNNAMED}multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOpListAlphaFunctor<2>>(T)": (
        "multi_tensor_apply_kernel<BinaryOpListAlpha>"
    ),
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(T1::Params)": (
        "cutlass_80_simt_sgemm_128x64_8x5_nn_align1"
    ),
    "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4"
    "_alignc4_execute_split_k_kernel__5x_cublas": (
        "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tile64x64x8_ffma_split_k"
    ),
    "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float>(P)": (
        "gemvx::kernel"
    ),
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    ),
    "Memcpy HtoD (Pageable -> Device)": "Memcpy HtoD",
    "Memset (Device)": "Memset",
    "aten::_softmax": "aten::_softmax",
    "triton_poi_fused_add_mul_3": "triton_poi_fused_add_mul_3",
}


def test_names_are_shortened_by_rule() -> None:
    assert {name: shorten(name) for name in EXAMPLES} == EXAMPLES


def test_a_truncated_name_keeps_the_number_at_its_end() -> None:
    long = "triton_per_fused__softmax__softmax_backward_data__to_copy_masked_fill_mul_view_"
    assert shorten(f"{long}10").endswith("…_view_10")
    assert shorten(f"{long}10") != shorten(f"{long}17")


@given(st.text(max_size=300))
def test_no_name_is_longer_than_the_limit(name: str) -> None:
    assert len(shorten(name)) <= MAX_LENGTH
