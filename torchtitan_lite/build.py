"""A run's parts, built from the whole config: its batches, its model, its metrics. A hub, like those that call it."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo import on_compile_end, on_compile_start
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.config import Config, dump_config, resolve_batch, resolve_degrees
from torchtitan_lite.data.dataloader import TrainingBatches, ValidationBatches
from torchtitan_lite.data.sources import build_source
from torchtitan_lite.data.token_store import TokenStore, open_token_store
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.errors import DataError
from torchtitan_lite.float8.convert import has_float8_units, resolve_emulate
from torchtitan_lite.float8.selection import format_choices
from torchtitan_lite.logger import logger
from torchtitan_lite.meta import build_meta_model, device_rates, predict_step
from torchtitan_lite.metrics.devices import lookup_device
from torchtitan_lite.metrics.flops import FlopsLedger
from torchtitan_lite.metrics.hardware import resolve_peaks, total_memory_gib
from torchtitan_lite.metrics.metrics import MetricsProcessor
from torchtitan_lite.metrics.records import Writer
from torchtitan_lite.metrics.writers import build_writers
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer, attention_backend
from torchtitan_lite.parallel.distributed import on_rank0
from torchtitan_lite.parallel.parallelize import parallelize


def build_batches(
    config: Config, tokenizer: Tokenizer, *, dp_rank: int, dp_degree: int, grad_accum_steps: int
) -> tuple[TokenStore, TrainingBatches, ValidationBatches | None]:
    """The training tokens, their batches, and where validation is on its batches, whose windows are held out of
    the training tokens if both are the same text. Raises DataError where ranks have different tokens."""
    training, validation = config.training, config.validation
    shape = {
        "seq_len": training.seq_len,
        "local_batch_size": training.local_batch_size,
        "dp_rank": dp_rank,
        "dp_degree": dp_degree,
    }
    source = build_source(training.dataset, training.dataset_path, text_field=training.text_field)
    store = open_token_store(source, tokenizer)
    check_same_tokens(store, source.name)
    held_out, validation_batches = 0, None
    if validation.enable:
        validation_store = store
        if validation.dataset or validation.dataset_path:
            source = build_source(
                validation.dataset or training.dataset,
                validation.dataset_path,
                text_field=training.text_field,
                key="[validation] dataset_path",
            )
            validation_store = open_token_store(source, tokenizer)
            check_same_tokens(validation_store, source.name)
        if validation_store.fingerprint == store.fingerprint:
            held_out = validation.steps * training.local_batch_size
        validation_batches = ValidationBatches(validation_store, steps=validation.steps, **shape)
    batches = TrainingBatches(
        store, grad_accum_steps=grad_accum_steps, seed=config.debug.seed, held_out=held_out, **shape
    )
    logger.info(
        f"{source.name}: {store.documents:,} documents, {len(store.tokens):,} tokens, an epoch is "
        f"{batches.epoch_size:,} windows of {training.seq_len}; {held_out:,} held out for validation"
    )
    return store, batches, validation_batches


def check_same_tokens(store: TokenStore, source: str) -> None:
    """Raise DataError, on every rank, unless all ranks have the same tokens. A collective call."""
    fingerprints = [""] * dist.get_world_size()
    dist.all_gather_object(fingerprints, store.fingerprint)
    others = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
    if others:
        raise DataError(
            f"{source}: rank 0 has other tokens than {len(others)} of {len(fingerprints)} ranks, the first of them "
            f"{others[0]}; train on one copy of the text, and for pystdlib with the same Python on every node."
        )


def build_model(
    config: Config, args: ModelArgs, *, mesh: DeviceMesh, device: torch.device
) -> tuple[Transformer, FlopsLedger]:
    """The model, converted, sharded and initialised, and the FLOPs of a token counted before it was sharded."""
    training, float8, tp = config.training, config.float8, mesh["tp"].size()
    dtype = getattr(torch, training.mixed_precision_param)
    attention = attention_backend(args, tp_degree=tp, dtype=dtype, device=device)
    spec = lookup_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    rates = device_rates(spec, config.metrics)
    meta = build_meta_model(
        config,
        args,
        tp_degree=tp,
        emulate=float8.enable_float8_linear and resolve_emulate(float8, device=device),
        fused_attention=attention != "MATH",
        rates=rates,
    )
    model, ledger = meta.model, meta.ledger
    logger.info(
        f"Llama 3 {config.model.flavor}: {meta.parameters:,} parameters, "
        f"vocabulary {args.vocab_size}; attention by {attention}"
    )
    if float8.enable_float8_linear:
        logger.info(f"float8, {float8.recipe_name}:\n{format_choices(meta.choices)}")
        if rates is not None:
            degrees = resolve_degrees(config.parallelism, world_size=mesh.size())
            logger.info(f"predicted: {predict_step(config, args, meta, degrees=degrees, rates=rates).verdict}")
    parts = ", ".join(f"{count / ledger.total:.2%} {name}" for name, count in ledger.by_precision.items() if count)
    emulated = " (float8, emulated, counts as fp32)" if ledger.emulated else ""
    again = f"; {sum(ledger.recompute.values()) / ledger.total:.2%} more are recomputed" if meta.recomputed else ""
    logger.info(f"{ledger.total:,} FLOPs per token: {parts}{emulated}{again}")
    parallelize(
        model,
        mesh,
        parallelism=config.parallelism,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        training=training,
    )
    model.to_empty(device="cpu" if training.enable_cpu_offload else device)
    init_weights(model, seed=config.debug.seed, buffer_device=device)
    return model, ledger


def hparams(config: Config, *, world_size: int) -> dict[str, bool | float | str]:
    """What is worth comparing between runs. TensorBoard shows the first five, by the alphabet, until asked for more."""
    degrees = resolve_degrees(config.parallelism, world_size=world_size)
    float8, training = config.float8, config.training
    return {
        "activation_checkpoint": config.activation_checkpoint.mode,
        "compile": config.compile.enable,
        "flavor": config.model.flavor,
        "float8": float8.recipe_name if float8.enable_float8_linear else "off",
        "float8_all_gather": float8.enable_fsdp_float8_all_gather,
        "global_batch_size": resolve_batch(training, dp_degree=degrees.dp).global_batch_size,
        "local_batch_size": training.local_batch_size,
        "lr": config.optimizer.lr,
        "seq_len": training.seq_len,
        "tensor_parallel_degree": degrees.tp,
        "world_size": world_size,
    }


def build_metrics(
    config: Config, ledger: FlopsLedger, *, device: torch.device, resume_step: int, start_tokens: int
) -> MetricsProcessor:
    """The metrics of a run that goes on after `resume_step` and `start_tokens`; rank 0 alone writes. On CPU all ranks
    measure their peaks here, at the same time."""
    dist.barrier()
    precisions = {precision for precision, count in ledger.by_precision.items() if count}
    if has_float8_units(device):
        precisions |= {"bf16", "fp8"}
    peaks = resolve_peaks(device, config.metrics, precisions=precisions)
    logger.info(f"{peaks}")
    writers: list[Writer] = []
    on_rank0(
        lambda: writers.extend(
            build_writers(
                config.metrics,
                dump_folder=Path(config.job.dump_folder),
                total_steps=config.training.steps,
                resume_step=resume_step,
                total_memory_gib=total_memory_gib(device),
                config_toml=dump_config(config),
                hparams=hparams(config, world_size=dist.get_world_size()),
            )
        )
    )
    metrics = MetricsProcessor(
        log_freq=config.metrics.log_freq,
        ledger=ledger,
        peaks=peaks,
        device=device,
        n_devices=dist.get_world_size(),
        writers=writers,
        start_tokens=start_tokens,
    )
    if config.compile.enable:
        on_compile_start(lambda _: metrics.compile_began())
        on_compile_end(lambda _: metrics.compile_ended())
    return metrics
