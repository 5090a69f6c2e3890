"""Cases that take long and differ from a case that `make test` runs in one choice only: `make test-all` runs them.

A case belongs here if it takes five seconds or more and each of its choices, such as a mesh, a recipe or a schedule, is
in another case of the same test, or in another test. Cases that are slow for another reason are marked in their file.
tests/conftest.py marks those below, and refuses a name that no test has.
"""

import pytest

# File and test: the names of its cases, as pytest prints them in brackets.
SLOW_CASES: dict[str, tuple[str, ...]] = {
    "adoption/test_huggingface.py::test_a_prompt_goes_on_as_the_equations_say": ("mixtral", "qwen2"),
    "adoption/test_huggingface.py::test_training_goes_on_from_them": ("one device",),
    "adoption/test_huggingface_families.py::test_a_prompt_goes_on_as_the_equations_say": (
        "gemma2", "granite", "smollm3",
    ),
    "adoption/test_huggingface_families.py::test_training_goes_on_from_them": ("granite",),
    "adoption/test_layer_names.py::test_names_that_are_taken": ("digits", "a slash"),
    "batches/test_dropout_steps.py::test_on_a_mesh": ("{'tensor': 2}",),
    "batches/test_packed_documents.py::test_packed_documents_are_documents_apart": ("gpt-full",),
    "compiled/test_experts.py::test_the_optimizer_writes_the_kernels_of_a_cache": ("block-2",),
    "compiled/test_hybrid.py::test_collectives_and_their_bytes": ("tensor 4",),
    "compiled/test_pipelines.py::test_nothing_is_copied": ("pipe 4, 1f1b",),
    "compiled/test_run.py::test_validation_and_sample": ("{'pipe': 2, 'data': 1, 'fsdp': 1, 'tensor': 2}",),
    "compiled/test_step.py::test_step_on_one_device": ("block-1-True", "current-1-False"),
    "core/test_checkpoint_names.py::test_bits_are_the_same": (
        "{}-DelayedScaling", "{'scanned': True}-CurrentScaling", "{'recompute': True}-CurrentScaling",
    ),
    "distributed/test_layer_work.py::test_a_layer_of_a_gpt_is_traced_four_times_whatever_the_depth": ("1f1b",),
    "distributed/test_layer_work.py::test_a_shared_trace_has_the_bits_of_a_trace_of_each": ("1f1b",),
    "masters/test_one_truth.py::test_no_sequence_of_calls_leaves_two_truths": ("float16 with float16", "bfloat16"),
    "meshes/test_adapters.py::test_frozen_kernels": (
        "{'data': 2, 'fsdp': 2}-delayed", "{'data': 2}-current", "{'fsdp': 2}-current",
    ),
    "meshes/test_adapters.py::test_kernels_that_are_params_may_be_split_over_tensor": (
        "{'tensor': 2}-delayed", "{'fsdp': 2, 'tensor': 2}-bf16",
    ),
    "meshes/test_diagnostics.py::test_parts_find_the_tensors_of_one_device": ("fsdp",),
    "meshes/test_families.py::test_a_step_is_that_of_one_device": (
        "olmo-fsdp 2", "gemma-pipe 2", "gemma-data 2, tensor 2",
    ),
    "meshes/test_learned.py::test_a_step_has_the_mean_of_the_whole_batch": (
        "data, microbatches", "data, pipe", "microbatches, lengths",
    ),
    "meshes/test_moments.py::test_bits_of_one_device": (
        "auto-deltas-8 bits", "auto-in_place-16 bits", "explicit-deltas-8 bits", "explicit-in_place-16 bits",
    ),
    "meshes/test_optimizers.py::test_optimizers": ("bfloat16 with remainders", "clipped"),
    "meshes/test_options.py::test_models_and_options": ("plain float32", "like Llama"),
    "meshes/test_options.py::test_stacked_layers": ("tensor",),
    "meshes/test_pipeline.py::test_a_step_is_that_without_pipe": (
        "tensor 2, pipe 2, zero-bubble, like Llama", "pipe 2, zero-bubble, recompute", "pipe 4, 1f1b",
        "pipe 2, interleaved", "data 2, tensor 2, pipe 2, gpipe, current", "pipe 2, gpipe", "pipe 2, 1f1b, current",
    ),
    "meshes/test_pipeline.py::test_every_schedule_on_every_mesh": ("tensor 2, pipe 2, sequence-gpipe",),
    "meshes/test_pipeline_layers.py::test_a_step_is_that_without_pipe": ("in a vmap", "in a branch, zero-bubble"),
    "meshes/test_placement_alone.py::test_training_on_an_explicit_mesh_is_training_on_one_device": (
        "data, in the context of its mesh",
    ),
    "meshes/test_rules.py::test_every_rule_is_right_or_refused_in_a_sentence": ("gated MLP",),
    "meshes/test_step.py::test_a_collective_that_is_left_out_is_noticed": ("what leaves the backward of an MLP",),
    "meshes/test_step.py::test_three_steps_are_those_of_one_device": (
        "data 2, tensor 2-current-4", "tensor 4-delayed-1", "tensor 4, sequence-delayed-1",
        "tensor 2, sequence-current-1",
    ),
    "meshes/test_tiles.py::test_a_step_is_that_of_one_device": ("pipe",),
    "models/huggingface/test_peft.py::test_loaded_adapters_compute_the_sum": (
        "False-joint", "True-all", "False-some", "True-gpt2",
    ),
    "models/test_generate.py::test_every_token_is_the_most_likely_one_after_the_full_pass": (
        "current, FP8 head", "qwen, delayed", "learned",
    ),
    "models/test_remat.py::test_a_step_does_not_depend_on_it": ("2-2-kinds1",),
    "models/test_remat.py::test_nor_on_a_mesh": ("{'fsdp': 2}-2",),
    "models/test_remat.py::test_without_fp8_norms_and_activations_are_made_again": ("experts",),
    "moe/test_moe.py::test_over_data_as_on_one_device": ("delayed-mesh-data",),
    "moe/test_moe.py::test_thirty_steps_learn": ("current", "block"),
    "moe/test_moe_diagnostics.py::test_the_share_of_tokens_that_each_expert_gets": (
        "current-{}", "delayed-{'remat': 'full'}",
    ),
    "moe/test_moe_weights.py::test_a_step_with_a_cache_is_the_step_without": ("current-2",),
    "nn/test_fp8_attention.py::test_on_a_mesh": ("{'data': 2, 'fsdp': 2}",),
    "nn/test_moe.py::test_layers_stacked_by_scan": ("current",),
    "recipes/test_block_weights.py::test_kernels_side_by_side": ("whole squares",),
    "recipes/test_planted_recipe.py::test_it_serves_recompute_and_the_head": ("block",),
    "run/test_data.py::test_a_run_resumes_exactly": ("parquet",),
    "run/test_start.py::test_adapters_are_tuned_on_a_frozen_model": ("delayed-data=1",),
    "run/test_train.py::test_a_run_that_nobody_reads_saves_its_checkpoint": ("no streams",),
    "state/test_frozen_kernels.py::test_the_same_bits_as_kernels_that_every_step_casts": ("none-block", "full-current"),
    "state/test_frozen_kernels.py::test_training_changes_the_adapters_alone": ("1-delayed", "2-current", "1-block"),
    "train/test_diagnostics.py::test_a_diagnosed_step_is_the_same_step": ("block-2",),
    "transformations/test_strict_modes.py::test_no_false_alarm_of_debug_nans": ("experts",),
}  # fmt: skip


def mark(items: list[pytest.Item], root: str = "tests/") -> list[str]:
    """Mark the cases among these tests as slow.

    Returns:
      Cases that are not among them.
    """
    left = {(test, name) for test, names in SLOW_CASES.items() for name in names}
    for item in items:
        test, bracket, name = item.nodeid.removeprefix(root).partition("[")
        case = test, name.removesuffix("]")
        if bracket and case in left:
            item.add_marker(pytest.mark.slow)
            left.discard(case)
    return sorted(f"{test}[{name}]" for test, name in left)
