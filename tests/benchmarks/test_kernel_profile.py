"""Each kernel of a profile lands in its category, by its name or by what the optimized HLO says of it."""

import pytest

INSTRUCTIONS = {  # of an optimized HLO module: result type, and the JAX scope in `op_name`
    "loop_convert_fusion.7": ("f8e4m3fn[4,128,256]{2,1,0}", "jit(step)/jvp(GPT)/block_0/norm/mul"),
    "input_reduce_fusion.6": ("f32[]", "jit(step)/jvp(PlainGPT)/qkv/Fp8DirectDotGeneralOp_0/reduce_max"),
    "loop_add_fusion.3": ("(f32[256]{0}, f32[256]{0}, f32[256]{0})", "jit(step)/add"),
    "input_reduce_fusion.5": ("f32[]", "jit(step)/transpose(jvp())/reduce_sum"),
    "loop_multiply_fusion": ("bf16[256]{0}", "jit(step)/jvp(GPT)/block_0/mul"),
    "input_reduce_fusion.7": ("f32[256]{0}", "jit(step)/transpose(jvp(GPT))/final_norm/reduce_sum"),
    "loop_slice_fusion.2": ("bf16[256]{0}", "jit(step)/jvp(GPT)/layer_0/attention/split"),
    "loop_add_fusion.9": ("f32[256]{0}", "jit(step)/while/body/add"),
    "copy.4": ("f32[256]{0}", "jit(step)/jvp(GPT)/transpose"),
    "gemm_fusion_dot.3": ("bf16[512,256]{1,0}", "jit(step)/jvp(GPT)/dot_general"),
}
FUSED = """
%gemm_fusion_dot.3_called (a: f8e4m3fn[512,256], b: f8e4m3fn[256,256]) -> bf16[512,256] {
}
%loop_multiply_fusion_called (a: bf16[256]) -> bf16[256] {
  %t = f32[256]{0} tanh(%a), metadata={op_name="jit(step)/jvp(GPT)/block_0/tanh"}
}
ENTRY %main (p: bf16[256]) -> bf16[256] {
"""
HLO = FUSED + "\n".join(
    f'  %{name} = {result} fusion(%p), kind=kLoop, calls=%{name}_called, metadata={{op_name="{scope}"}}'
    for name, (result, scope) in INSTRUCTIONS.items()
)

KERNELS = {
    "nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_coopA_TNT": "FP8 GEMM",
    "nvjet_qqsss_128x256_128x4_TNT": "FP8 GEMM",
    "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x128x128": "FP8 GEMM",
    "gemm_fusion_dot_3": "FP8 GEMM",
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT": "bf16 GEMM",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_5": "attention",
    "void jax_fp8::(anonymous namespace)::quantize_transpose_kernel<__nv_bfloat16>(int)": "quantize, transpose, amax",
    "void jax_fp8::(anonymous namespace)::amax_kernel<float>(float const*)": "quantize, transpose, amax",
    "jax_fp8::(anonymous namespace)::transpose_kernel(unsigned char const*)": "quantize, transpose, amax",
    "void jax_fp8::quantize_tile_kernel<(jax_fp8::Fp8Type)1, jax_fp8::Matrix<float>>(int)": "quantize, transpose, amax",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*)": "attention",
    "void cudnn::fusion::convert_dq_to_16bits<true>(void const*)": "attention",
    "void jax_fp8::quantize_tile_kernel<(jax_fp8::Fp8Type)0, jax_fp8::Activated<float>>(int)": "norms, activations",
    "void jax_fp8::norm_backward::rows_kernel<jax_fp8::BFloat16, 256>(int)": "norms, activations",
    "jax_fp8::column_sums_kernel(jax_fp8::ColumnSums)": "norms, activations",
    "void jax_fp8::cross_entropy::rows_kernel<jax_fp8::BFloat16, (jax_fp8::Fp8Type)1>(int)": "loss",
    "jax_fp8::(anonymous namespace)::update_state_kernel(int)": "optimizer, state",
    "loop_convert_fusion_7": "quantize, transpose, amax",
    "input_reduce_fusion_6": "quantize, transpose, amax",
    "loop_add_fusion_3": "optimizer, state",
    "input_reduce_fusion_5": "loss",
    "loop_multiply_fusion": "norms, activations",
    "input_reduce_fusion_7": "norms, activations",
    "loop_slice_fusion_2": "other fusions",
    "loop_add_fusion_9": "other fusions",
    "loop_unknown_fusion": "other fusions",
    "MemcpyD2D": "copies, memsets",
    "Memset": "copies, memsets",
    "copy_4": "copies, memsets",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "collectives",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "collectives",
    "void stream_executor::gpu::AllReduceKernelImpl<float>(float*)": "collectives",
    "something_else": "other",
}


def a_trace(names, process="/device:GPU:0", thread="Stream #20(Compute)"):
    """Trace events as the profiler writes them: each kernel twice, 500 microseconds long and as far apart."""
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": process}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": thread}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 3, "args": {"name": "XLA Ops"}},
    ]
    for index, name in enumerate([*names, *names]):
        event = {"ph": "X", "pid": 1, "tid": 2, "ts": 1000 * index, "dur": 500, "name": name, "args": {}}
        events += [event, {**event, "tid": 3}]  # the same kernel on a derived line must not count twice
    return events


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_lands_in_its_category(benchmark, name):
    profile = benchmark("kernel_profile")
    found = profile.summarize(a_trace([name]), steps=2, instructions=profile.read_hlo(HLO))
    assert {key: ms for key, ms in found.by_category().items() if ms} == {KERNELS[name]: pytest.approx(0.5)}


def test_a_profile_adds_up_and_follows_hlo_op(benchmark):
    profile = benchmark("kernel_profile")
    events = a_trace(KERNELS)
    events[-2]["args"]["hlo_op"] = "loop_add_fusion.3"  # the op, where the trace has one, outranks the kernel's name
    found = profile.summarize(events, steps=2, instructions=profile.read_hlo(HLO))
    assert found.busy_ms == pytest.approx(0.5 * len(KERNELS))
    assert sum(found.by_category().values()) == pytest.approx(found.busy_ms)
    assert found.span_ms == pytest.approx((2 * len(KERNELS) - 0.5) / 2)
    assert found.by_category()["other"] == pytest.approx(0.25)
    assert "nvjet_sm90_qqtst" in found.markdown()
    stored = found.to_json()
    assert sum(kernel["microseconds"] for kernel in stored["kernels"]) / 2e3 == pytest.approx(stored["busy_ms"])
    assert sum(stored["launches"].values()) == pytest.approx(len(KERNELS))
    assert "| all kernels |" in profile.merged({"bf16": stored})


def test_a_trace_without_a_gpu_is_an_error(benchmark):
    profile = benchmark("kernel_profile")
    with pytest.raises(ValueError, match=r"kernels of a GPU stream, but it has /host:CPU"):
        profile.summarize(a_trace(KERNELS, process="/host:CPU"), 2, {})
