"""Long tests that show again, on another way, what a test of `make test` shows: `make test-all` runs them.

Of a test that takes more than a second for each of its cases, `make test` runs one long case, and more where the others
are no variations of it: each recipe, mesh and schedule is in some test that it runs. Tests that are slow for another
reason are marked in their file. tests/conftest.py marks those below, and refuses a name that no test has.
"""

import pytest

WHOLE = ()  # the whole test, whatever cases it has
# File and test: the names of its cases, as pytest prints them in brackets.
SLOW_CASES: dict[str, tuple[str, ...]] = {
    "adoption/test_huggingface.py::test_a_prompt_goes_on_as_the_equations_say": ("mixtral", "qwen2"),
    "adoption/test_huggingface.py::test_params_as_they_were_read_may_be_constants_of_a_program": ("llama-None",),
    "adoption/test_huggingface.py::test_training_goes_on_from_them": ("one device",),
    "adoption/test_huggingface_families.py::test_a_prompt_goes_on_as_the_equations_say": (
        "gemma2", "granite", "smollm3",
    ),
    "adoption/test_huggingface_families.py::test_training_goes_on_from_them": ("granite", "gemma3"),
    "adoption/test_layer_names.py::test_names_that_are_taken": ("digits", "a slash"),
    "adoption/test_switch_over.py::test_a_language_model_in_make_train_step": ("2",),
    "adoption/test_variables.py::test_an_older_layout_loads": ("llama",),
    "batches/test_dropout_steps.py::test_a_forward_that_is_computed_again_has_its_masks": ("norms",),
    "batches/test_dropout_steps.py::test_on_a_mesh": ("{'tensor': 2}", "{'data': 2, 'fsdp': 2}"),
    "batches/test_packed_documents.py::test_packed_documents_are_documents_apart": ("gpt-full",),
    "batches/test_packed_documents.py::test_steps_on_meshes": ("{'sequence': 2}",),
    "batches/test_padding.py::test_padded_sequences_are_sequences_alone": ("gpt-none",),
    "batches/test_padding.py::test_steps_on_padded_sequences": ("{'data': 2}",),
    "benchmarks/test_end_to_end.py::test_a_profile_that_fails_costs_no_times": WHOLE,
    "benchmarks/test_end_to_end.py::test_a_variant_that_fails_is_a_row_that_says_so": WHOLE,
    "benchmarks/test_end_to_end.py::test_every_variant_trains_the_same_model": ("current", "delayed_fast_head"),
    "benchmarks/test_experts.py::test_every_variant_trains_the_same_model": ("ours_bf16", "block"),
    "benchmarks/test_experts.py::test_the_plain_model_is_ours": WHOLE,
    "benchmarks/test_meshes.py::test_pieces_are_the_whole_step": WHOLE,
    "compiled/test_adapters.py::test_frozen_params_have_no_weight_gradients": ("bf16-1", "bf16-2", "delayed-1"),
    "compiled/test_adapters.py::test_remat_saves_memory_over_tensor": WHOLE,
    "compiled/test_diagnostics.py::test_it_is_one_graph_of_the_same_kernels_and_copies_nothing": ("skip",),
    "compiled/test_experts.py::test_the_optimizer_writes_the_kernels_of_a_cache": ("block-2", "delayed-1", "delayed-2"),
    "compiled/test_experts.py::test_what_a_step_becomes": (
        "block-1-1", "delayed-1-1", "current-1-2", "current-2-1", "delayed-2-2",
    ),
    "compiled/test_fp8_attention.py::test_every_device_has_its_batches_and_its_heads": ("Explicit",),
    "compiled/test_fp8_attention.py::test_heads_that_an_axis_does_not_divide": WHOLE,
    "compiled/test_fp8_attention.py::test_long_sequences_have_a_backward_each": WHOLE,
    "compiled/test_hybrid.py::test_collectives_and_their_bytes": ("tensor 4", "fsdp 4", "data 4"),
    "compiled/test_meshes.py::test_data_parallel": ("Explicit",),
    "compiled/test_meshes.py::test_tensor_parallel": ("grouped-Auto",),
    "compiled/test_offload_steps.py::test_scratch_falls_by_what_moves": WHOLE,
    "compiled/test_pieces.py::test_the_end_of_a_step_moves_nothing_between_devices": ("Auto",),
    "compiled/test_pipelines.py::test_each_weight_is_cast_once": ("pipe 4, 1f1b",),
    "compiled/test_pipelines.py::test_nothing_is_copied": ("pipe 4, 1f1b",),
    "compiled/test_run.py::test_validation_and_sample": ("{'pipe': 2, 'data': 1, 'fsdp': 1, 'tensor': 2}",),
    "compiled/test_step.py::test_every_weight_is_cast_once_a_step": ("1-True",),
    "compiled/test_step.py::test_step_on_four_devices_data_parallel": ("block",),
    "compiled/test_step.py::test_step_on_one_device": (
        "block-1-True", "current-1-False", "delayed-1-True", "block-1-False",
    ),
    "core/test_checkpoint_names.py::test_bits_are_the_same": (
        "{}-DelayedScaling", "{'scanned': True}-CurrentScaling", "{'recompute': True}-CurrentScaling",
        "{'recompute': True}-DelayedScaling", "{'scanned': True}-DelayedScaling",
    ),
    "core/test_recipe_rules.py::test_a_mixture_of_experts_has_its_own_rule": WHOLE,
    "core/test_recipe_rules.py::test_on_a_mesh_rules_give_the_losses_of_one_device": WHOLE,
    "core/test_recipe_rules.py::test_steps_with_rules_learn_and_fill_the_histories": ("options1",),
    "distributed/test_layer_work.py::test_a_layer_of_a_gpt_is_traced_four_times_whatever_the_depth": (
        "1f1b", "zero-bubble",
    ),
    "distributed/test_layer_work.py::test_a_shared_trace_has_the_bits_of_a_trace_of_each": ("1f1b", "interleaved"),
    "distributed/test_mesh_pass.py::test_the_loss_of_a_state_on_a_mesh": (
        "{'tensor': 2}-explicit", "{'fsdp': 2}-auto", "{'fsdp': 2}-explicit",
    ),
    "distributed/test_microbatches.py::test_recipes_without_state": ("bf16", "current"),
    "distributed/test_microbatches.py::test_the_layers_of_a_recipe_without_state_are_found": WHOLE,
    "distributed/test_stage_work.py::test_units_are_the_ordinary_gradients": ("delayed, a first pass",),
    "examples/test_examples.py::test_mesh": WHOLE,
    "examples/test_examples.py::test_train_gpt": ("bf16",),
    "grads/test_loss_trace.py::test_a_loss_is_called_at_most_twice_and_on_a_mesh_three_times": (
        "None-both", "current-both", "current-one device", "current-fsdp", "delayed-one device", "delayed-fsdp",
        "current-data", "delayed-both",
    ),
    "grads/test_tape.py::test_a_planted_measurement_is_found": ("on_stages",),
    "integrations/test_tunix.py::test_a_step_is_that_of_a_loop_of_ones_own": ("Derived",),
    "masters/test_moments.py::test_a_second_moment_falls_again": ("float8_e4m3fn",),
    "masters/test_moments.py::test_moments_of_tiny_gradients": ("float8_e4m3fn",),
    "masters/test_moments.py::test_remainders_are_float32_masters_bit_for_bit": ("in_place",),
    "masters/test_one_truth.py::test_no_sequence_of_calls_leaves_two_truths": (
        "float16 with float16", "bfloat16", "float32",
    ),
    "meshes/test_adapters.py::test_frozen_kernels": (
        "{'data': 2, 'fsdp': 2}-delayed", "{'data': 2}-current", "{'fsdp': 2}-current", "{'fsdp': 2}-delayed",
        "{'data': 2}-delayed",
    ),
    "meshes/test_adapters.py::test_frozen_kernels_are_split_over_tensor": (
        "current-{'tensor': 2}-1", "delayed-{'tensor': 2}-2", "block-{'fsdp': 2, 'tensor': 2}-1",
        "delayed-{'data': 2, 'tensor': 2}-1",
    ),
    "meshes/test_adapters.py::test_kernels_that_are_params_may_be_split_over_tensor": (
        "{'tensor': 2}-delayed", "{'fsdp': 2, 'tensor': 2}-bf16", "{'fsdp': 2, 'tensor': 2}-delayed",
    ),
    "meshes/test_adapters.py::test_sequence_parallel": ("bf16",),
    "meshes/test_diagnostics.py::test_parts_find_the_tensors_of_one_device": ("fsdp", "tensor"),
    "meshes/test_families.py::test_a_step_is_that_of_one_device": (
        "olmo-fsdp 2", "gemma-pipe 2", "gemma-data 2, tensor 2", "gemma-tensor 2, sequence", "gemma-fsdp 2",
    ),
    "meshes/test_heads.py::test_gradients_are_those_of_one_device": (
        "by rows", "fewer keys than devices", "heads apart",
    ),
    "meshes/test_learned.py::test_a_step_has_the_mean_of_the_whole_batch": (
        "data, microbatches", "data, pipe", "microbatches, lengths", "fsdp, tensor, sequence", "one",
    ),
    "meshes/test_moments.py::test_a_kernel_is_told_where_its_shards_lie": ("auto",),
    "meshes/test_moments.py::test_bits_of_one_device": (
        "auto-deltas-8 bits", "auto-in_place-16 bits", "explicit-deltas-8 bits", "explicit-in_place-16 bits",
        "auto-deltas-16 bits", "explicit-in_place-8 bits",
    ),
    "meshes/test_names.py::test_losses_of_params_that_are_placed_by_names": WHOLE,
    "meshes/test_optimizers.py::test_optimizers": ("bfloat16 with remainders", "clipped", "fused, clipped"),
    "meshes/test_options.py::test_layers_of_ones_own_are_split_by_fields_or_by_rules": ("Dense, rules",),
    "meshes/test_options.py::test_models_and_options": (
        "plain float32", "like Llama", "keys and values left whole by a rule", "gradients in bfloat16",
        "weights gathered for each microbatch",
    ),
    "meshes/test_options.py::test_stacked_layers": ("tensor",),
    "meshes/test_pipeline.py::test_a_step_is_that_without_pipe": (
        "tensor 2, pipe 2, zero-bubble, like Llama", "pipe 2, zero-bubble, recompute", "pipe 4, 1f1b",
        "pipe 2, interleaved", "data 2, tensor 2, pipe 2, gpipe, current", "pipe 2, gpipe", "pipe 2, 1f1b, current",
        "fsdp 2, pipe 2, gpipe, bfloat16", "data 2, fsdp 2, pipe 2, zero-bubble, current",
        "pipe 3, 1f1b, kernels that it does not split", "tensor 2, pipe 2, 1f1b, sequence",
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
        "tensor 2, sequence-current-1", "fsdp 2-delayed-1", "data 2-current-1", "fsdp 2-current-4",
        "tensor 2-delayed-1", "data 2-delayed-4",
    ),
    "meshes/test_tiles.py::test_a_step_is_that_of_one_device": ("pipe", "data, fsdp"),
    "models/huggingface/test_frozen.py::test_the_weights_of_freeze_kernels": ("mixtral", "gpt2"),
    "models/huggingface/test_peft.py::test_loaded_adapters_compute_the_sum": (
        "False-joint", "True-all", "False-some", "True-gpt2",
    ),
    "models/test_decoder.py::test_a_valid_weight_cache_is_not_cast_again": ("delayed",),
    "models/test_decoder.py::test_one_kernel_attends_to_the_cache": ("rotary",),
    "models/test_generate.py::test_every_token_is_the_most_likely_one_after_the_full_pass": (
        "current, FP8 head", "qwen, delayed", "learned",
    ),
    "models/test_loss.py::test_tokens_of_every_dtype_have_one_loss": ("256",),
    "models/test_remat.py::test_a_step_does_not_depend_on_it": ("2-2-kinds1",),
    "models/test_remat.py::test_nor_are_collectives_without_fp8": WHOLE,
    "models/test_remat.py::test_nor_on_a_mesh": ("{'fsdp': 2}-2",),
    "models/test_remat.py::test_without_fp8_norms_and_activations_are_made_again": ("experts",),
    "moe/test_moe.py::test_over_data_as_on_one_device": (
        "delayed-mesh-data", "delayed-auto-data", "delayed-explicit-data", "delayed-mesh-fsdp",
    ),
    "moe/test_moe.py::test_remat_gives_the_same_gradients": ("full",),
    "moe/test_moe.py::test_thirty_steps_learn": ("current", "block", "none"),
    "moe/test_moe_diagnostics.py::test_how_tensors_of_experts_were_cast": ("current-1", "delayed-1"),
    "moe/test_moe_diagnostics.py::test_the_share_of_tokens_that_each_expert_gets": (
        "current-{}", "delayed-{'remat': 'full'}", "delayed-{'microbatches': 2}",
    ),
    "moe/test_moe_weights.py::test_a_step_with_a_cache_is_the_step_without": ("current-2", "delayed-1"),
    "moe/test_moe_weights.py::test_training_goes_on_with_a_cache_over_data": WHOLE,
    "nn/test_block.py::test_fp8_block_is_the_bfloat16_block_within_fp8": ("llama",),
    "nn/test_dot_general.py::test_state_follows_under_remat_and_scan": ("remat",),
    "nn/test_dot_general.py::test_steps_of_nn_dense_are_those_of_our_dense_bit_for_bit": ("delayed-1",),
    "nn/test_dropout.py::test_what_a_layer_adds_is_dropped": ("experts-current",),
    "nn/test_fp8_attention.py::test_a_layer_is_the_layer_of_16_bits": ("self",),
    "nn/test_fp8_attention.py::test_a_step_records_once": ("{'remat': 'norms'}", "{'remat': 'full'}"),
    "nn/test_fp8_attention.py::test_a_step_that_is_diagnosed": WHOLE,
    "nn/test_fp8_attention.py::test_on_a_mesh": ("{'data': 2, 'fsdp': 2}",),
    "nn/test_fp8_attention.py::test_wherever_a_layer_runs": ("cond",),
    "nn/test_moe.py::test_against_dense_float32": ("current", "block"),
    "nn/test_moe.py::test_layers_stacked_by_scan": ("current",),
    "nnx/test_adapters.py::test_a_layer_with_an_adapter_is_the_linen_one": ("mlp-delayed",),
    "nnx/test_adapters.py::test_in_a_compiled_step": ("1",),
    "nnx/test_functional.py::test_microbatches_with_a_weight_cache_and_without": ("current",),
    "ops/test_dot_general.py::test_einsum_and_its_gradients_are_those_of_jnp": ("BTNH,BNHC->NBTC",),
    "parallel/test_runner.py::test_gradients_are_those_of_the_model": ("zero-bubble-4-6",),
    "recipes/test_block_weights.py::test_cached_steps_have_the_bits_of_steps_that_cast": (
        "other formula-fused", "block-chained", "block-other moments",
    ),
    "recipes/test_block_weights.py::test_kernels_side_by_side": ("whole squares",),
    "recipes/test_block_weights.py::test_microbatches": ("deltas",),
    "recipes/test_planted_recipe.py::test_it_serves_recompute_and_the_head": ("block", "planted"),
    "run/test_conversations.py::test_loss_and_gradients_are_those_of_a_loss_by_hand": (
        "data=2,tensor=2-2", "data=2,fsdp=2-2",
    ),
    "run/test_data.py::test_a_run_resumes_exactly": ("parquet", "chat", "tokens"),
    "run/test_devices.py::test_validation_and_sample_where_pipe_splits_params": WHOLE,
    "run/test_leaving.py::test_the_first_signal_is_asked_for_after_a_step": ("15-143",),
    "run/test_resuming.py::test_a_run_with_dropout_goes_on_with_its_masks": WHOLE,
    "run/test_start.py::test_a_model_goes_through_a_run_bit_for_bit_and_has_its_own_loss": (
        "delayed-data=2,fsdp=2-bfloat16",
    ),
    "run/test_start.py::test_a_run_continues_without_the_model_that_it_began_with": WHOLE,
    "run/test_start.py::test_adapters_are_tuned_on_a_frozen_model": ("delayed-fsdp=2", "current-tensor=2"),
    "run/test_train.py::test_a_name_that_is_taken_gets_a_number": WHOLE,
    "run/test_train.py::test_a_run_that_nobody_reads_saves_its_checkpoint": ("no streams",),
    "state/test_frozen_kernels.py::test_a_merged_model_is_base_plus_adapters": ("block", "current"),
    "state/test_frozen_kernels.py::test_kernels_that_are_apart": ("delayed", "block"),
    "state/test_frozen_kernels.py::test_the_same_bits_as_kernels_that_every_step_casts": (
        "none-block", "full-current", "full-block",
    ),
    "state/test_frozen_kernels.py::test_training_changes_the_adapters_alone": (
        "1-delayed", "2-current", "1-block", "1-current", "2-delayed",
    ),
    "state/test_frozen_kernels.py::test_without_a_recipe_layers_multiply_by_frozen_weights_in_their_dtype": (
        "True-block", "True-current", "False-block",
    ),
    "state/test_weight_cache.py::test_cached_steps_have_the_bits_of_steps_that_cast": ("chained", "fused", "frozen"),
    "state/test_weight_cache.py::test_kernels_side_by_side": ("cast_after",),
    "state/test_weight_cache.py::test_microbatches": ("deltas",),
    "train/test_diagnostics.py::test_a_diagnosed_step_is_the_same_step": ("block-2", "bf16-1"),
    "train/test_diagnostics.py::test_a_planted_fault_is_named": (
        "delayed-fault0-% of the input of first is larger than its scale allows",
        "current-fault3-100 % of the output gradient of block/down is not finite",
    ),
    "train/test_warming.py::test_a_first_step_that_was_skipped_leaves_nothing_and_the_next_one_warms": (
        "1-{'data': 2}",
    ),
    "transformations/test_delayed_layers.py::test_all_kinds_of_layers": ("current", "delayed"),
    "transformations/test_strict_modes.py::test_no_false_alarm_of_debug_nans": ("experts", "block"),
    "transformations/test_strict_modes.py::test_no_false_alarm_outside_of_jit": ("delayed-disable_jit",),
    "transformations/test_strict_modes.py::test_strict_promotion": ("gated", "experts"),
    "transformations/test_ways_to_differentiate.py::test_every_way_learns_the_same": ("plain", "with_mutable"),
}  # fmt: skip


def mark(items: list[pytest.Item], root: str = "tests/") -> list[str]:
    """Mark the cases among these tests as slow.

    Returns:
      Cases that are not among them.
    """
    left = {(test, name) for test, names in SLOW_CASES.items() for name in names or [""]}
    found = set()
    for item in items:
        test, bracket, name = item.nodeid.removeprefix(root).partition("[")
        case = (test, "") if SLOW_CASES.get(test) == WHOLE else (test, name.removesuffix("]"))
        if case in left and (bracket or case[1] == ""):
            item.add_marker(pytest.mark.slow)
            found.add(case)
    return sorted(f"{test}[{name}]" if name else test for test, name in left - found)
