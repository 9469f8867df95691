from __future__ import annotations

import pytest

from graphcap_backend.capture.kernel_names import display_name

ADD = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_"
ADD_VECTORS_OF_8 = ADD.replace("ILi4E", "ILi8E")
FILL_BF16 = (
    "_ZN2at6native29vectorized_elementwise_kernelILi8ENS0_11FillFunctorIN3c108BFloat16EEESt5arrayIPcLm1EEEEviT0_T1_"
)
MUL_SCALAR = (
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_13AUnaryFunctorIfffNS0_15binary_internal10MulFunctorIfEEEE"
    "St5arrayIPcLm2EEEEviT0_T1_"
)
GELU = (
    "_ZN2at6native29vectorized_elementwise_kernelILi4EZZZNS0_18GeluCUDAKernelImplERNS_18TensorIteratorBaseENS0_8GeluType"
    "EENKUlvE0_clEvENKUlvE2_clEvEUlfE_St5arrayIPcLm2EEEEviT0_T1_"
)
COPY = (
    "_ZN2at6native18elementwise_kernelILi128ELi2EZNS0_22gpu_kernel_impl_nocastIZZZNS0_23direct_copy_kernel_cudaERNS_18"
    "TensorIteratorBaseEENKUlvE1_clEvENKUlvE5_clEvEUlfE_EEvS4_RKT_EUliE_EEviT1_"
)
SUM = (
    "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_14func_wrapper_tIfZNS0_11sum_functorIfffEclERNS_14"
    "TensorIteratorEEUlffE_EEjfLi4ELi4EEEEEvT1_"
)
SOFTMAX = "_ZN43_GLOBAL__N__90d1fb18_10_SoftMax_cu_9f978f6320softmax_warp_forwardIfffLi8ELb0ELb0EEEvPT0_PKT_iiiPKbib"
CUTLASS = "_ZN7cutlass7Kernel2I42cutlass_80_simt_sgemm_128x64_8x5_nn_align1EEvNT_6ParamsE"
ELEMENTWISE = "at::native::vectorized_elementwise_kernel"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("triton_poi_fused_gelu_0", "triton_poi_fused_gelu"),
        ("triton_per_fused__softmax_12", "triton_per_fused__softmax"),
        ("triton_red_fused_1", "triton_red_fused"),
        ("cpp_fused_0", "cpp_fused"),
        ("cpp_fused_add_mul_3", "cpp_fused_add_mul"),
        ("triton_", "triton_"),
        # Not Inductor's: a number at the end is part of the name.
        ("triton_add_1", "triton_add_1"),
        ("my_kernel_2", "my_kernel_2"),
        ("aten.add_.Tensor", "aten.add_.Tensor"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"),
        ("sm80_xmma_gemm_tn_execute_kernel__5x_cublas", "sm80_xmma_gemm_tn_execute_kernel"),
        ("kernel_9f978f63d1d7db44_main", "kernel_main"),
        ("kernel_deadbeefdeadbeef", "kernel_deadbeefdeadbeef"),
        ("_Zbroken", "_Zbroken"),
        ("", ""),
    ],
)
def test_plain_and_generated_names(name: str, shown: str) -> None:
    assert display_name(name) == shown


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (ADD, f"{ELEMENTWISE}<CUDAFunctor_add, float>"),
        (FILL_BF16, f"{ELEMENTWISE}<FillFunctor, BFloat16>"),
        (MUL_SCALAR, f"{ELEMENTWISE}<AUnaryFunctor, float, MulFunctor>"),
        (GELU, f"{ELEMENTWISE}<GeluCUDAKernelImpl, float>"),
        (COPY, "at::native::elementwise_kernel<gpu_kernel_impl_nocast, direct_copy_kernel_cuda, float>"),
        (SUM, "at::native::reduce_kernel<ReduceOp, float, sum_functor>"),
        (SOFTMAX, "softmax_warp_forward<float>"),
        (CUTLASS, "cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>"),
        ("_Z9my_kernelPfi", "my_kernel"),
    ],
)
def test_mangled_names_keep_what_they_compute_and_on_which_type(name: str, shown: str) -> None:
    assert display_name(name) == shown


def test_a_vector_width_does_not_tell_kernels_apart() -> None:
    assert display_name(ADD) == display_name(ADD_VECTORS_OF_8)


def test_template_arguments_can_be_left_out() -> None:
    assert display_name(GELU, template_arguments=False) == ELEMENTWISE
