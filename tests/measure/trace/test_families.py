"""Families of real kernel names: cuBLAS, CUTLASS, PyTorch, Inductor, NCCL, CPU operators."""

from __future__ import annotations

import csv

import pytest

from lmlab.measure.trace.families import FAMILIES, RULES, family, is_optimizer, rule_of
from lmlab.study.files import ROOT

NATIVE = "void at::native::"
UNNAMED = f"{NATIVE}(anonymous namespace)::"

EXAMPLES = {
    "matmul_tensor_core": [
        "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn",
        "ampere_bf16_s16816gemm_bf16_64x64_ldg8_relu_f2f_stages_64x5_nn",
        "volta_h884gemm_128x128_ldg8_tn",
        "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>(Params)",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn>(P)",
        "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize64x64x32_stage4_warpsize2x2x1_tensor16x8x8"
        "_execute_kernel__5x_cublas",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute"
        "_segment_k_off_kernel__5x_cublas",
        "nvjet_sm90_tst_64x64_64x13_2x1_v_bz_NNT",
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<MainloopSm90TmaGmma>>(P)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x64x64_4x1x1",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Params)",
        "flash_forward_kernel",
        "flash_backward_kernel",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
    ],
    "matmul_simt": [
        "ampere_sgemm_128x64_tn",
        "ampere_sgemm_64x32_sliced1x4_nt",
        "volta_sgemm_128x32_nn",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(T1::Params)",
        "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4"
        "_alignc4_execute_kernel__5x_cublas",
        "void magma_sgemmEx_kernel<float, float, float, (bool)1, (bool)0, (int)6>(int, int)",
        "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 4, true, cublasGemvTensorStridedBatched>()",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(P)",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float>(P)",
        "void gemvNSP_kernel<__nv_bfloat16, __nv_bfloat16, float, 1, 16, 4, 1024>(P)",
        "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const>>>(P)",
    ],
    "matmul": [
        "void some_library::gemm_kernel<float>(Params)",
        "triton_tem_fused_mm_3",
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ],
    "softmax": [
        f"{UNNAMED}softmax_warp_forward<float, float, float, 8, false, false>(float*)",
        f"{UNNAMED}softmax_warp_backward<float, float, float, 8, false, false>(float*)",
        f"{UNNAMED}cunn_SoftMaxForward<4, float, float, float, SoftMaxForwardEpilogue>(float*)",
        f"{UNNAMED}cunn_SoftMaxBackward<8, c10::BFloat16, float, c10::BFloat16>(c10::BFloat16*)",
        "triton_per_fused__softmax__to_copy_exp_masked_fill_mul_prepare_softmax_online_sub_view_4",
        "aten::_softmax",
        "aten::_log_softmax_backward_data",
    ],
    "elementwise": [
        f"{NATIVE}vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>>(int)",
        f"{NATIVE}unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, 4>(int)",
        f"{NATIVE}elementwise_kernel<128, 2, at::native::addcmul_cuda_kernel(at::Iterator&)>(int)",
        f"{NATIVE}index_elementwise_kernel<(int)128, (int)4, void at::native::gpu_index_kernel>(T)",
        f"{UNNAMED}distribution_elementwise_grid_stride_kernel<float, 4>(long)",
        f"{UNNAMED}fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>(Info)",
        f"{NATIVE}triu_tril_kernel<bool, int, true, 8, true>(TensorInfo<bool, int>)",
        "triton_poi_fused__unsafe_view_mul_silu_9",
        "aten::mul",
        "aten::add_",
        "aten::silu_backward",
        "aten::masked_fill_",
        "aten::_foreach_add_",
    ],
    "reduction": [
        f"{NATIVE}reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>()",
        f"{UNNAMED}vectorized_layer_norm_kernel<float, float, false>(int, float)",
        f"{UNNAMED}RowwiseMomentsCUDAKernel<float, float>(long, float, float const*)",
        f"{UNNAMED}nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*)",
        f"{UNNAMED}embedding_backward_feature_kernel<float, float, long>(long const*)",
        "void <unnamed>::indexing_backward_kernel<float, (int)4>(const long *)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(Params)",
        "delta_kernel",
        "triton_red_fused__to_copy_add_mul_sum_view_14",
        "triton_per_fused__to_copy_add_embedding_mean_mul_pow_rsqrt_0",
        "aten::sum",
        "aten::mean",
        "aten::embedding_dense_backward",
    ],
    "copy": [
        "Memcpy HtoD (Pageable -> Device)",
        "Memcpy DtoD",
        "Memset (Device)",
        "[CUDA memcpy Host-to-Device]",
        f"{NATIVE}elementwise_kernel<128, 2, at::native::direct_copy_kernel_cuda(Iterator&)>(int)",
        f"{NATIVE}vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(It&)>()",
        f"{UNNAMED}CatArrayBatchedCopy_vectorized<OpaqueType<4>, unsigned int, 1, 128>(char*)",
        f"{NATIVE}vectorized_gather_kernel<(int)16, long>(char *)",
        f"{UNNAMED}indexSelectSmallIndex<float, long, unsigned int, 2, 2, -2>(TensorInfo)",
        "aten::copy_",
        "aten::cat",
    ],
    "communication": [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclDevComm*)",
        "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 8>(T)",
        "gloo:all_reduce",
        "c10d::allreduce_",
    ],
    "optimizer": [
        f"{UNNAMED}multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOpListAlphaFunctor>()",
        f"{UNNAMED}multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMath>()",
        "aten::_fused_adamw_",
    ],
    "other": [
        f"{NATIVE}radixSortKVInPlace<-2, -1, 128, 32, float, long, unsigned int>(TensorInfo)",
        "CUDA graph 5",
        "aten::linear",
        "aten::softmax",
    ],
}


@pytest.mark.parametrize("expected", EXAMPLES)
def test_the_name_determines_the_family(expected: str) -> None:
    assert {name: family(name) for name in EXAMPLES[expected]} == dict.fromkeys(
        EXAMPLES[expected], expected
    )


def test_kernels_published_for_other_gpus_are_all_known() -> None:
    with (ROOT / "report" / "references" / "kernels.csv").open() as file:
        names = {row["kernel"] for row in csv.DictReader(file)}
    assert names
    assert {name for name in names if family(name) == "other"} == set()


def test_every_rule_is_needed_and_gives_a_known_family() -> None:
    used = {rule_of(name) for names in EXAMPLES.values() for name in names}
    assert [rule.pattern for rule in RULES if rule not in used] == []
    assert {rule.family for rule in RULES} | {"other"} == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("optimizer", True),
        ("optimizer step", True),
        ("Optimizer.step#AdamW.step", True),
        ("Optimizer.zero_grad#AdamW.zero_grad", False),
        ("zero_grad", False),
    ],
)
def test_the_optimizers_range_is_recognized_by_name(name: str, expected: bool) -> None:
    assert is_optimizer(["step", name]) is expected
