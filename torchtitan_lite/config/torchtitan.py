"""Keys of torchtitan, from before v0.1.0 to v0.2.2, and former ones of ours, that are not here."""

from fnmatch import fnmatchcase

from .keys import KEYS

CONVERTERS = "model.converters"
UNREAD = [
    "float8.recipe_name",
    "float8.filter_fqns",
    "float8.enable_fsdp_float8_all_gather",
    "float8.precompute_float8_dynamic_scale_for_fsdp",
]
"""Keys that torchtitan does not read if the converter is mx."""
MOVED = {
    "experimental": "parallelism",
    "quantize.linear.float8": "float8",
    "quantize.linear.mx": "mx",
    "scheduler": "lr_scheduler",
}
"""Current name of each renamed table; keys in FOREIGN keep the old one."""
ALIASES = {
    CONVERTERS: "float8.enable_float8_linear",
    "job.print_args": "job.print_config",
    "model.hf_assets_path": "model.tokenizer_path",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.deterministic": "debug.deterministic",
    "training.seed": "debug.seed",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "validation.enabled": "validation.enable",
}
"""Current name of each renamed key."""
ALIASES |= {
    name.replace("parallelism", "training"): name for name in KEYS if "parallelism." in name
}

ANY, OFF = None, (False,)
FOREIGN: dict[str, tuple[object, ...] | None] = {
    "job.use_for_integration_test": ANY,
    "job.save_config_file": ANY,
    "job.custom_config_module": ("",),
    "experimental.custom_args_module": ("",),
    "model.norm_type": ("rmsnorm", "fused_rmsnorm"),
    "model.print_after_conversion": ANY,
    "optimizer.early_step_in_backward": OFF,
    "training.gc_debug": OFF,
    "training.dataloader.*": ANY,
    "validation.dataloader.*": ANY,
    "parallelism.enable_compiled_autograd": OFF,
    "parallelism.pipeline_parallel_schedule_csv": ("",),
    "parallelism.pipeline_parallel_microbatches": (),
    "parallelism.pipeline_parallel_expert_parallel_overlap": ANY,
    "parallelism.context_parallel_load_balancer": ("headtail",),
    "parallelism.context_parallel_rotate_method": ("allgather",),
    "parallelism.expert_*_degree": (1,),
    "parallelism.expert_parallel_comm_backend": ANY,
    "debug.moe_force_load_balance": ANY,
    "float8.moe_fqns_prototype": ANY,
    "mx.moe_fqns_prototype": ANY,
    "quantize.grouped_mm.*": ANY,
    "metrics.*_color_printing": ANY,
    "checkpoint.interval_type": ("steps",),
    "checkpoint.create_seed_checkpoint": OFF,
    "checkpoint.initial_load_in_hf_quantized": OFF,
    "checkpoint.enable_ft_dataloader_checkpoints": ANY,
    "fault_tolerance.enable": OFF,
    "fault_tolerance.*": ANY,
    "activation_checkpoint.per_op_sac_force_*": ([], ["moe.router.gate"], "", "moe.router.gate"),
    "activation_checkpoint.preserve_rng_state": ANY,
    "activation_checkpoint.determinism_check": ("default", "none"),
    "activation_checkpoint.debug": OFF,
    "activation_checkpoint.visualize_*": OFF,
    "float8.force_recompute_fp8_weight_in_bwd": ANY,
    "mx.recipe_name": ("mxfp8", "mxfp8_cublas", "mxfp8_cublas_rceil", "mxfp8_emulated"),
    "mx.*_kernel*": ANY,
    "mx.filter_fqns": ANY,
    "comm.mode": ("default",),
    "memory_estimation.enable*": OFF,
    "memory_estimation.disable_fake_mode": ANY,
    "debug.deterministic_warn_only": OFF,
    "checkpoint.verify_hashes": (True,),
    "checkpoint.on_failure": ("stop",),
    "checkpoint.save_request_file": ("SAVE",),
    "float8.scale_gradients_in_matmul": OFF,
    "metrics.measure_peak": OFF,
}
"""Patterns of keys without a counterpart here, with the values that load: they ask for what happens
here: ANY, or a tuple (with lists as text too). The first match counts."""


def find_foreign(name: str) -> str | None:
    """Return the first pattern of FOREIGN that a key's dotted name matches."""
    return next((pattern for pattern in FOREIGN if fnmatchcase(name, pattern)), None)


def current_name(name: str) -> str:
    """Return the current dotted name of a key or table."""
    table, _, key = name.rpartition(".")
    if table in MOVED and name not in KEYS and not find_foreign(name):
        name = f"{MOVED[table]}.{key}"
    return ALIASES.get(name, MOVED.get(name, name))
