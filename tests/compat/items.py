"""The 148 items of the five documents that shardckpt was made from: what shows each, and how it compares.

A row is ``(item, verdict, test)``, and for a documented difference the text of one of the READMEs ``DOCUMENTS``
that says so.
"""

from __future__ import annotations

from typing import NamedTuple

AS_WRITTEN, BETTER, DIFFERENCE = "as written", "better", "documented difference"
#: Where differences are documented.
DOCUMENTS = ("shardckpt/compat/README.md", "shardckpt/compat/megatron/README.md")


class Item(NamedTuple):
    """What a document describes, how ours compares, the test that shows it, and where a difference stands."""

    item: str
    verdict: str
    test: str
    documented: str = ""


_MINDSPEED = "tests/compat/test_mindspeed.py"
_ITEMS = "tests/compat/test_document_items.py"
_PROGRAMS = "tests/ci/compat/test_programs.py"
_SHARDS = "tests/huggingface/test_shards.py"
_CLEANUP = "tests/manager/test_cleanup.py"
_CALLS = "tests/compat/test_calls.py"
_PLANNERS = "tests/compat/test_planners.py"
_TORCH_SHARDS = "tests/compat/test_torch_shards.py"
_LOADING = "tests/optimizer/test_loading.py"
_TITAN = "tests/compat/test_torchtitan.py"
_MANAGER = "tests/manager/test_manager.py"

_TRAINED = f"{_PROGRAMS}::test_experts_are_trained_exported_and_resumed_as_in_mindspeed"
_RESTORED = f"{_MINDSPEED}::test_restore_gives_all_experts_in_true_order_and_drop_undoes_it"
_UNCHANGED = f"{_MINDSPEED}::test_what_needs_no_change_comes_back_as_it_is"
_BY_PATH = f"{_CALLS}::test_strategies_are_called_with_a_path"
_CONSTANTS = f"{_ITEMS}::test_megatrons_constants_and_registration"
_CONVERTED = f"{_TORCH_SHARDS}::test_shards_are_converted_saved_loaded_and_converted_back"
_FSDP = f"{_PROGRAMS}::test_fsdps_program_of_2023_resumes"
_LOOP = f"{_PROGRAMS}::test_torchtitans_loop_of_spring_2025_resumes"
_AS_THEY_STAND = f"{_TITAN}::test_the_documents_calls_run_as_they_stand"
_LAST = f"{_TITAN}::test_a_forced_save_is_the_last"

ITEMS = {
    "MindSpeed-LLM": [
        Item("get_dtype_size: every dtype has a size", BETTER, f"{_SHARDS}::test_every_dtype_has_a_size"),
        Item("synchronize", AS_WRITTEN, f"{_MINDSPEED}::test_synchronize_and_empty_cache_run_without_an_accelerator"),
        Item("empty_cache", AS_WRITTEN, f"{_MINDSPEED}::test_synchronize_and_empty_cache_run_without_an_accelerator"),
        Item("get_shard_info by place", AS_WRITTEN, f"{_SHARDS}::test_a_folder_written_by_the_callers_loop_loads"),
        Item("get_shard_info(safe_serialization=)", AS_WRITTEN, f"{_SHARDS}::test_a_cast_counts_for_floats_only"),
        Item("get_shard_info's result, in order", AS_WRITTEN, f"{_SHARDS}::test_names_of_one_file_follow_each_other"),
        Item("save_dtype counts for floats alone", BETTER, f"{_SHARDS}::test_a_cast_counts_for_floats_only"),
        Item("save_dtype of 8 bits", AS_WRITTEN, f"{_SHARDS}::test_a_cast_counts_for_floats_only"),
        Item("shard_size, as text too", BETTER, f"{_SHARDS}::test_sizes_are_numbers_or_text"),
        Item("an empty state dict is not sharded", BETTER, f"{_SHARDS}::test_nothing_is_one_file_of_nothing"),
        Item("tied tensors have a file each", AS_WRITTEN, f"{_SHARDS}::test_names_of_one_file_follow_each_other"),
        Item(
            "save_state_dict by place, of views too",
            BETTER,
            f"{_SHARDS}::test_a_file_has_what_views_show_and_tied_weights_once",
        ),
        Item("save_state_dict's keywords", AS_WRITTEN, f"{_SHARDS}::test_a_folder_written_by_the_callers_loop_loads"),
        Item(
            "the header says format=pt",
            AS_WRITTEN,
            f"{_SHARDS}::test_a_file_has_what_views_show_and_tied_weights_once",
        ),
        Item(".bin files", BETTER, f"{_SHARDS}::test_a_bin_file_keeps_ties_and_no_more_than_it_shows"),
        Item("no limit keeps all", AS_WRITTEN, f"{_CLEANUP}::test_no_limit_keeps_all"),
        Item("output_dir/checkpoints", AS_WRITTEN, f"{_CLEANUP}::test_checkpoints_lie_in_a_folder_of_that_name"),
        Item("ordered by step, not by time", BETTER, f"{_ITEMS}::test_checkpoints_are_ordered_by_step"),
        Item(
            "any directory counts",
            DIFFERENCE,
            f"{_CLEANUP}::test_what_is_left_is_said_once_with_the_reason",
            "removes complete checkpoints only",
        ),
        Item(
            "shared_file_system=False",
            AS_WRITTEN,
            "tests/ci/manager/test_cleanup.py::test_each_nodes_first_rank_removes_there",
        ),
        Item("all ranks meet", BETTER, f"{_CLEANUP}::test_an_error_on_the_main_rank_is_everyones"),
        Item("cleanup_old_checkpoints(training_args=)", AS_WRITTEN, f"{_CLEANUP}::test_every_trainers_names"),
        Item("drop_ep_dim", BETTER, _RESTORED),
        Item("drop_ep_dim's keywords", AS_WRITTEN, _UNCHANGED),
        Item("drop_ep_dim of a tensor on mesh['ep']", AS_WRITTEN, _UNCHANGED),
        Item("drop_ep_dim of a plain tensor", AS_WRITTEN, _UNCHANGED),
        Item("a mesh of any dimensions", BETTER, _RESTORED),
        Item("restore_ep_dim: experts in true order", BETTER, _RESTORED),
        Item("restore_ep_dim's keywords", AS_WRITTEN, _UNCHANGED),
        Item("restore_ep_dim of no tensor", BETTER, f"{_MINDSPEED}::test_what_is_no_tensor_is_not_restored"),
        Item("restore, dcp.save, dcp.load, drop", AS_WRITTEN, _TRAINED),
        Item("EPSpecInfo's placement is a Shard", AS_WRITTEN, _TRAINED),
        Item(
            "build_ep_fqn2spec_info of a trainer's objects",
            DIFFERENCE,
            "tests/compat/test_parallel_state.py::test_a_parallel_state_of_methods_alone_is_understood",
            "makes no mesh: sizes alone do where FSDP holds the experts, plain experts need the mesh",
        ),
        Item(
            "no expert found is an error",
            AS_WRITTEN,
            f"{_MINDSPEED}::test_a_trainers_objects_are_understood",
        ),
        Item(
            "get_ep_modules",
            DIFFERENCE,
            f"{_MINDSPEED}::test_braces_hold_the_numbers_of_layers",
            "returns parameters; takes patterns",
        ),
        Item(
            "dcp_to_torch_state_dict(save_checkpoint_path)",
            AS_WRITTEN,
            "tests/compat/test_mindspeed_convert.py::test_a_checkpoint_nests_as_torchs_converter_nests_it",
        ),
    ],
    "Megatron-Core": [
        Item("MSC_PREFIX", AS_WRITTEN, _CONSTANTS),
        Item("_metadata_fn, logger", AS_WRITTEN, _CONSTANTS),
        Item(
            "MCoreMetadata, MCoreSavePlan",
            AS_WRITTEN,
            f"{_TORCH_SHARDS}::test_old_pickles_classes_are_torchs_with_one_more_field",
        ),
        Item("register_default_torch_strategies", AS_WRITTEN, _CONSTANTS),
        Item(
            "flatten_state_dict",
            AS_WRITTEN,
            f"{_TORCH_SHARDS}::test_state_dicts_are_flattened_as_torch_flattens_them",
        ),
        Item(
            "sharded_tensor_to_torch_sharded_tensor",
            DIFFERENCE,
            f"{_TORCH_SHARDS}::test_shards_become_a_sharded_tensor_of_torchs",
            "the caller's shards do not change; refuses what is no regular grid",
        ),
        Item(
            "mcore_to_pyt_state_dict",
            DIFFERENCE,
            _CONVERTED,
            "prepended axes are a `CheckpointableShardedTensor`, too",
        ),
        Item("the private helpers around it", AS_WRITTEN, _CONVERTED),
        Item(
            "_get_filesystem_reader", DIFFERENCE, _CONVERTED, "a `CheckpointStorageReader`: checks digests; reads URLs"
        ),
        Item("get_reformulation_metadata", DIFFERENCE, _CONSTANTS, "Megatron's `get_reformulation_metadata` is absent"),
        Item("MCoreSavePlanner", AS_WRITTEN, f"{_PLANNERS}::test_they_serve_dcp_alone_and_on_ranks"),
        Item("decentralized plans", AS_WRITTEN, f"{_PLANNERS}::test_a_decentralized_plan_is_the_ranks_own"),
        Item("dedup_replicated_tensors=", AS_WRITTEN, f"{_PLANNERS}::test_a_flattened_plan_is_never_decentralized"),
        Item("objects of all ranks are written", AS_WRITTEN, f"{_PLANNERS}::test_they_serve_dcp_alone_and_on_ranks"),
        Item("transform_object", AS_WRITTEN, f"{_PLANNERS}::test_a_bytes_object_is_stored_as_it_is"),
        Item("MCoreLoadPlanner", AS_WRITTEN, f"{_PLANNERS}::test_they_serve_dcp_alone_and_on_ranks"),
        Item(
            "shapes_validation_sharded_tensors=, allow_shape_mismatch_sharded_tensors=",
            AS_WRITTEN,
            f"{_PLANNERS}::test_shapes_are_checked_before_anything_is_filled",
        ),
        Item(
            "_validate_global_shapes names all",
            BETTER,
            f"{_PLANNERS}::test_shapes_are_checked_before_anything_is_filled",
        ),
        Item(
            "what may mismatch has the common part",
            AS_WRITTEN,
            f"{_PLANNERS}::test_tensors_that_may_differ_have_the_common_rows",
        ),
        Item(
            "FP8 in resolve_tensor and commit_tensor",
            BETTER,
            f"{_PLANNERS}::test_quantized_tensors_are_resolved_plain_and_committed",
        ),
        Item(
            "TorchDistSaveShardedStrategy's six arguments",
            AS_WRITTEN,
            f"{_ITEMS}::test_megatrons_save_strategy_takes_its_six_arguments",
        ),
        Item("keep_only_main_replica", AS_WRITTEN, "tests/torch_dist/test_save.py::test_any_replica_may_be_written"),
        Item(
            "thread_count",
            AS_WRITTEN,
            "tests/torch_dist/test_save.py::test_thread_count_is_the_number_of_files_and_they_are_even",
        ),
        Item(
            "cached_metadata is never stale",
            BETTER,
            f"{_ITEMS}::test_megatrons_save_strategy_takes_its_six_arguments",
        ),
        Item(
            "separation_hint",
            AS_WRITTEN,
            "tests/torch_dist/test_save.py::test_separation_hint_keeps_keys_in_files_of_their_own",
        ),
        Item("async_save is an AsyncRequest", AS_WRITTEN, _BY_PATH),
        Item(
            "_get_save_and_finalize_callbacks",
            DIFFERENCE,
            f"{_TORCH_SHARDS}::test_a_writers_plan_becomes_a_request",
            "for another library's writer; a subclass that overrides it is an error",
        ),
        Item("can_handle_sharded_objects", AS_WRITTEN, _CONSTANTS),
        Item("TorchDistLoadShardedStrategy.load", AS_WRITTEN, _BY_PATH),
        Item("load_tensors_metadata", AS_WRITTEN, _BY_PATH),
        Item(
            "load_tensors_metadata(metadata=)",
            AS_WRITTEN,
            "tests/compat/test_trainer.py::test_the_trainers_calls_save_and_load",
        ),
        Item(
            "load_sharded_metadata has objects, too",
            AS_WRITTEN,
            "tests/compat/test_training.py::test_a_job_for_megatron_runs_here",
        ),
        Item(
            "remove_sharded_tensors, in one exchange",
            BETTER,
            "tests/compat/test_training.py::test_a_job_for_megatron_runs_here",
        ),
        Item("compatibility checks raise", BETTER, f"{_CALLS}::test_strategies_refuse_what_they_do_not_read"),
        Item("a BytesIO in a ShardedObject", AS_WRITTEN, f"{_ITEMS}::test_a_bytes_object_comes_back_on_its_rank"),
        Item("flattened shards at their true shape", BETTER, f"{_ITEMS}::test_flattened_shards_have_their_true_shape"),
        Item("prepended axes", AS_WRITTEN, _CONVERTED),
        Item(
            "old checkpoints by version",
            BETTER,
            "tests/test_golden.py::test_a_golden_checkpoint_loads_at_any_world_size",
        ),
        Item(
            "strategies by entry points",
            BETTER,
            "tests/ci/test_third_party_plugin.py::test_an_installed_plugin_is_listed",
        ),
    ],
    "EPLoadPlanner": [
        Item(
            "the planner of the same name",
            DIFFERENCE,
            f"{_MINDSPEED}::test_the_planner_of_the_same_name_points_to_it",
            "new code: `shardckpt_ep.EPLoadPlanner`, which takes layouts",
        ),
        Item(
            "EPLoadPlanner(ep_rank=, ep_size=, check_moe_fn=)",
            AS_WRITTEN,
            f"{_PROGRAMS}::test_experts_are_loaded_by_the_planner_of_plain_dcp",
        ),
        Item("its defaults", AS_WRITTEN, f"{_MINDSPEED}::test_the_planner_has_the_originals_defaults"),
        Item("DCP's keywords", AS_WRITTEN, f"{_ITEMS}::test_the_planner_reads_any_stored_chunks"),
        Item("create_local_plan patches nothing", BETTER, "tests/ep/test_planners.py::test_dcp_is_untouched"),
        Item(
            "create_default_local_load_plan_with_moe by place",
            AS_WRITTEN,
            f"{_ITEMS}::test_another_size_of_what_is_no_expert_is_torchs_error",
        ),
        Item("a missing key", AS_WRITTEN, f"{_MINDSPEED}::test_a_missing_key_is_refused_where_strict"),
        Item(
            "the size of what is no expert",
            AS_WRITTEN,
            f"{_ITEMS}::test_another_size_of_what_is_no_expert_is_torchs_error",
        ),
        Item("the size of experts", BETTER, f"{_MINDSPEED}::test_a_tensor_of_neither_length_is_refused"),
        Item(
            "get_chunk_readitem(readitem, ep_rank, operate_dim=0)",
            AS_WRITTEN,
            f"{_MINDSPEED}::test_an_item_of_different_axes_is_refused",
        ),
        Item("any stored chunks", BETTER, f"{_ITEMS}::test_the_planner_reads_any_stored_chunks"),
        Item("uneven experts", BETTER, f"{_ITEMS}::test_the_planner_reads_any_stored_chunks"),
        Item(
            "get_check_moe_func by whole names",
            BETTER,
            f"{_MINDSPEED}::test_specs_and_checks_go_by_exact_names_at_any_module_path",
        ),
        Item(
            "names of meshes and of recompute wrappers",
            AS_WRITTEN,
            f"{_ITEMS}::test_experts_are_known_by_the_name_of_their_mesh",
        ),
        Item(
            "a strategy for experts",
            BETTER,
            "tests/ci/ep/test_matrix.py::test_planners_take_any_layout_through_plain_dcp",
        ),
    ],
    "torch": [
        Item("load_sharded_optimizer_state_dict", AS_WRITTEN, _FSDP),
        Item("optimizer_key=, storage_reader=", AS_WRITTEN, _FSDP),
        Item("any reader, path or URL", BETTER, "tests/optimizer/test_readers.py::test_any_reader_of_torch_is_taken"),
        Item("FSDP.optim_state_dict_to_load takes it", AS_WRITTEN, _FSDP),
        Item("nested ShardedTensors", BETTER, "tests/optimizer/test_layout.py::test_state_of_torchs_sharded_tensors"),
        Item("DTensors", BETTER, "tests/optimizer/test_layout.py::test_state_has_the_layout_of_its_parameter"),
        Item(
            "any device",
            BETTER,
            "tests/compat/test_torch_optimizer.py::test_memory_is_allocated_where_there_is_a_device",
        ),
        Item("numbers and objects", AS_WRITTEN, f"{_LOADING}::test_state_that_is_no_tensor"),
        Item("a key that is not there", BETTER, f"{_LOADING}::test_names_that_do_not_fit_are_explained"),
        Item("planner=", AS_WRITTEN, f"{_LOADING}::test_a_planner_is_taken_where_it_changes_nothing"),
        Item(
            "state of another shape",
            BETTER,
            "tests/optimizer/test_layout.py::test_state_of_another_shape_than_its_parameter_is_refused",
        ),
        Item("ranks that disagree", BETTER, f"{_LOADING}::test_ranks_must_mean_the_same_optimizer"),
        Item(
            "an optimizer goes on",
            AS_WRITTEN,
            "tests/ci/optimizer/test_resume.py::test_as_many_ranks_go_on_bit_for_bit",
        ),
        Item(
            "the private helpers",
            AS_WRITTEN,
            "tests/compat/test_torch_optimizer.py::test_a_part_of_a_stored_tensor_is_read_at_its_offset",
        ),
    ],
    "torchtitan": [
        Item("MODEL, OPTIMIZER", AS_WRITTEN, f"{_TITAN}::test_names_are_the_documents"),
        Item("LR_SCHEDULER, DATALOADER, TRAIN_STATE", AS_WRITTEN, f"{_TITAN}::test_names_are_the_documents"),
        Item("AsyncMode", AS_WRITTEN, f"{_TITAN}::test_names_are_the_documents"),
        Item("async_mode in any case", AS_WRITTEN, _AS_THEY_STAND),
        Item("ModelWrapper", AS_WRITTEN, f"{_TITAN}::test_a_model_wrapper_merges_parts"),
        Item(
            "Terminate, SaveDone, save_with_gc, checkpoint_mp, purge_thread",
            DIFFERENCE,
            "tests/ci/compat/test_torchtitan_helpers.py::test_the_processes_of_all_ranks_save_together",
            "CPU tensors and gloo; the manager needs none",
        ),
        Item(
            "garbage collection around saves",
            DIFFERENCE,
            "tests/compat/test_torchtitan_helpers.py::test_a_state_is_saved_and_replaced",
            "saves by this package; the manager needs none",
        ),
        Item("the constructor's keywords", AS_WRITTEN, _LOOP),
        Item("names of options", AS_WRITTEN, f"{_TITAN}::test_the_options_are_attributes"),
        Item("dump_folder is joined", AS_WRITTEN, f"{_TITAN}::test_the_options_are_attributes"),
        Item("three modes", AS_WRITTEN, _LOOP),
        Item(
            "no __main__ guard",
            BETTER,
            "tests/ci/background/test_exit.py::test_a_save_in_flight_at_the_end_of_one_process_is_finished",
        ),
        Item(
            "a background process that dies",
            BETTER,
            "tests/ci/background/test_async_save.py::test_a_dead_worker_is_everyones_error",
        ),
        Item(
            "a training that is killed",
            BETTER,
            "tests/ci/faults/test_manager_kill.py::test_a_killed_run_goes_on_from_the_newest_committed_step",
        ),
        Item("a full disk", BETTER, "tests/ci/faults/test_disks.py::test_a_full_disk_leaves_old_or_new"),
        Item("maybe_wait_for_staging", DIFFERENCE, _LOOP, "`save` has copied already"),
        Item(
            "keep_latest_k=1",
            DIFFERENCE,
            "tests/manager/test_config.py::test_configurations_that_contradict_themselves",
            "`keep_latest_k=1` is refused with an asynchronous mode only",
        ),
        Item(
            "purge removes steps alone",
            BETTER,
            "tests/manager/test_garbage_collection.py::test_foreign_names_are_never_touched",
        ),
        Item("save(step, force) by place", AS_WRITTEN, _LOOP),
        Item("save(curr_step=)", AS_WRITTEN, _AS_THEY_STAND),
        Item("step 1 is saved", AS_WRITTEN, _AS_THEY_STAND),
        Item("a step that is not due", AS_WRITTEN, _AS_THEY_STAND),
        Item(
            "force is the last step, whose weights alone have no prefix",
            AS_WRITTEN,
            "tests/compat/test_torchtitan_last_save.py::test_every_reader_finds_the_names_of_the_model",
        ),
        Item("the last save has everything by default", AS_WRITTEN, _LAST),
        Item("freqs_cis is left out", AS_WRITTEN, _LAST),
        Item("export_dtype", BETTER, f"{_MANAGER}::test_integers_and_buffers_are_not_cast"),
        Item(
            "load(-1) takes the newest good one",
            BETTER,
            "tests/manager/test_step_resolution.py::test_a_damaged_newest_is_skipped_and_named",
        ),
        Item(
            "load of an absent step",
            DIFFERENCE,
            "tests/manager/test_step_resolution.py::test_a_certain_step_that_is_missing_is_an_error",
            "an absent step is an error",
        ),
        Item("load without a folder", AS_WRITTEN, _AS_THEY_STAND),
        Item("numbers that are no step", BETTER, f"{_TITAN}::test_only_minus_one_means_the_newest"),
        Item("of step 0 the model alone", AS_WRITTEN, f"{_TITAN}::test_of_step_0_the_model_alone_is_loaded"),
        Item("exclude_from_loading, unknown names", BETTER, f"{_MANAGER}::test_states_that_are_excluded_or_new"),
        Item(
            "exclude_from_loading the optimizer alone",
            DIFFERENCE,
            "tests/manager/test_config.py::test_configurations_that_contradict_themselves",
            "`exclude_from_loading` with the optimizer needs the scheduler, too",
        ),
        Item(
            "replicas of torchft",
            AS_WRITTEN,
            "tests/ci/manager/replicas/test_fault_tolerance.py::test_the_first_replica_saves_for_all",
        ),
        Item(
            "replicas with enable_checkpoint=False",
            DIFFERENCE,
            "tests/manager/replicas/test_fault_tolerance.py::test_without_checkpoints_it_heals",
            "With `enable_checkpoint=False` a replica saves nothing, its data loader neither",
        ),
        Item("several parts, flattened optimizers", AS_WRITTEN, _LOOP),
        Item(
            "several schedulers",
            AS_WRITTEN,
            "tests/manager/test_replicated_states.py::test_a_list_of_schedulers_is_saved_and_resumed",
        ),
        Item("another world size", BETTER, f"{_ITEMS}::test_a_loader_of_another_world_size_says_so"),
        Item("initial_load_path", AS_WRITTEN, f"{_MANAGER}::test_where_to_begin"),
        Item(
            "a manager that is not closed",
            AS_WRITTEN,
            "tests/ci/manager/test_exit.py::test_a_dropped_manager_of_several_ranks_has_saved",
        ),
        Item(
            "a folder of torchtitan's own manager",
            AS_WRITTEN,
            "tests/ci/interop/test_torchtitan.py::test_what_torchtitans_manager_saved_resumes_here",
        ),
        Item(
            "stock DCP reads ours",
            AS_WRITTEN,
            "tests/interop/test_stock_dcp.py::test_stock_dcp_resumes_what_was_saved_here",
        ),
        Item(
            "a parameter without gradient",
            BETTER,
            "tests/adapters/test_absent_state.py::test_the_manager_loads_what_it_saved",
        ),
        Item("local experts", BETTER, f"{_ITEMS}::test_experts_of_a_rank_are_saved_by_their_description"),
    ],
}
