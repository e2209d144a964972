"""DeepSpeed's private names.

They were read in 0.16.0, 0.17.6, 0.18.9, 0.19.3, 0.19.6 and 0.19.8.
"""

from packaging.version import Version

#: The methods that are replaced, in the order of a step.
STEP = "step"
PREPARE = "_prepare_sub_group"
UPDATE = "_optimizer_step"
COPY_BACK = "_reassign_or_swap_out_partitioned_parameters"
RELEASE = "_release_sub_group"
POST_STEP = "_post_step"
#: The others that are replaced: before state is read from files, after a checkpoint was loaded, at the end, before a
#: checkpoint is saved, and of the engine when it is made.
SWAP_IN = "_optimizer_states_and_gradient_swap_in"
RESET = "reset_swap_buffers"
DESTROY = "destroy"
STATE_DICT = "state_dict"
CONFIGURE = "_configure_zero_optimizer"
#: Those that handle gradients: each reduction in backward, the last one where the caller does not manage accumulation,
#: and the check for overflow.
PARTITION_GRADS = "partition_grads"
FINALIZE = "_finalize_offload_gradient_accumulation"
HAS_OVERFLOW = "has_overflow"
#: Those in whose middle copies go to the device: after a checkpoint was loaded, a universal one, one of parameters
#: alone; after states were offloaded; and before a step of Muon's.
RESTORE, RESTORE_UNIVERSAL = "_rigid_load_state_dict", "load_hp_checkpoint_state_from_checkpoint_dir_stage3"
RESTORE_PARAMETERS = "load_module_checkpoint_state_from_checkpoint_dir_stage3"
RELOAD = "reload_states"
MUON = "_apply_muon_updates_cpu_offload"
#: And ZenFlow's, a function of a module.
ZENFLOW_WAIT = "wait_last_update_and_copy"

#: The methods that a step's patches rely on: those that are replaced, and those that run in between.
REPLACED = (STEP, UPDATE, COPY_BACK, RELEASE, POST_STEP)
SITES = (*REPLACED, PREPARE, "unscale_and_clip_grads")
FLAT = ("fp16_partitioned_groups_flat", "fp32_partitioned_groups_flat")
#: The first and the last version whose step was read.
READ = (Version("0.16.0"), Version("0.19.8"))
#: And those of SuperOffload's step.
SUPEROFFLOAD_READ = (Version("0.18.9"), Version("0.19.8"))

_ALL, _SINCE_0_17, _SINCE_0_18 = ("0.16.0", "0.19.8"), ("0.17.6", "0.19.8"), ("0.18.9", "0.19.8")
_SINCE_0_19_8 = ("0.19.8", "0.19.8")
#: Each private name, with the first and the last version in which it was read.
NAMES = {
    # ZeRO-3's optimizer; the copy-back has the same body in all of these, and SuperOffload has its own
    **dict.fromkeys(("DeepSpeedZeroOptimizer_Stage3", UPDATE, COPY_BACK, RELEASE, POST_STEP, RESET), _ALL),
    **dict.fromkeys((PREPARE, "unscale_and_clip_grads", "_unflatten_partitioned_parameters"), _ALL),
    **dict.fromkeys(("fp16_partitioned_groups_flat", "fp32_partitioned_groups_flat"), _ALL),
    **dict.fromkeys(("swap_optimizer", "_swappable_optimizer_subgroup"), _ALL),
    "zenflow": _SINCE_0_17,
    **dict.fromkeys(("SuperOffloadOptimizer_Stage3", "superoffload_cpu_optimizer"), _SINCE_0_18),
    # Its gradients; the bodies of these have the same order of work in all of these
    **dict.fromkeys((PARTITION_GRADS, HAS_OVERFLOW, "grad_partitions_flat_buffer", "micro_step_id"), _ALL),
    **dict.fromkeys(("__param_id_to_grad_partition", "grad_position", "get_param_id", "fp16_groups"), _ALL),
    **dict.fromkeys(("offload_optimizer_pin_memory", "torch_autocast_gradscaler"), _ALL),
    FINALIZE: ("0.19.6", "0.19.8"),
    # What of it copies to the device in the middle
    **dict.fromkeys((RESTORE, RESTORE_UNIVERSAL, RELOAD), _ALL),
    RESTORE_PARAMETERS: ("0.19.3", "0.19.8"),
    **dict.fromkeys((MUON, "use_muon"), _SINCE_0_19_8),
    **dict.fromkeys((ZENFLOW_WAIT, "stale_param", "zenflow_overlap_step"), _SINCE_0_18),
    # Its swapper
    **dict.fromkeys(("optimizer_swapper", "swap_buffer_manager", "all_buffers", "used_buffer_index"), _ALL),
    **dict.fromkeys(("swap_params_info", "release_unswapped_gradients", "ds_id", "swap_folder"), _ALL),
    "swap_paths": ("0.16.0", "0.16.0"),  # the master's is the first
    "swap_path": _SINCE_0_17,  # of each of an info's ``tensors``
    # What of it gradients and state in files pass through, which is left to DeepSpeed in older versions
    **dict.fromkeys(("swap_out_gradients", "swapped_gradients", "unswapped_gradients"), _SINCE_0_19_8),
    **dict.fromkeys(("_writeback_gradients", "has_state_tensors"), _SINCE_0_19_8),
    **dict.fromkeys((SWAP_IN, "_release_swap_buffers"), _SINCE_0_19_8),
    # CPU Adam
    **dict.fromkeys(("DeepSpeedCPUAdam", "ds_opt_adam", "adam_update"), _ALL),
    # The engine
    **dict.fromkeys(("DeepSpeedEngine", CONFIGURE, "_param_dict"), _ALL),
}
