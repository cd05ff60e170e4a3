"""A run's parts, built from the whole config: batches, model, checkpoints, metrics. A hub, like
those that call it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo import on_compile_end, on_compile_start
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.checkpoint.checkpointer import Checkpointer
from torchtitan_lite.checkpoint.manifest import Progress
from torchtitan_lite.collectives import on_all_ranks, on_rank0
from torchtitan_lite.config import (
    BatchSizes,
    Config,
    ParallelDegrees,
    TrainingConfig,
    check_decay,
    dump_config,
    resolve_batch,
    resolve_degrees,
    resolve_shares,
)
from torchtitan_lite.data.dataloader import Corpus, TrainingBatches, ValidationBatches
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.token_store import TokenStore, open_data
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.errors import ConfigError, DataError
from torchtitan_lite.float8.convert import has_float8_units, resolve_emulate
from torchtitan_lite.float8.observe import Asked
from torchtitan_lite.float8.selection import OUTPUT, LinearChoice, format_choices
from torchtitan_lite.float8.shared_casts import keep_shared_casts
from torchtitan_lite.logger import logger
from torchtitan_lite.metrics.devices import lookup_device
from torchtitan_lite.metrics.flops import FlopsLedger
from torchtitan_lite.metrics.hardware import host_memory_gib, resolve_peaks, total_memory_gib
from torchtitan_lite.metrics.processor import MetricsProcessor
from torchtitan_lite.metrics.records import Writer
from torchtitan_lite.metrics.writers import build_writers
from torchtitan_lite.models.attention import (
    attention_backend,
    attention_inputs,
    prefer_backend,
    time_backends,
)
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.parallel.distributed import local_world_size
from torchtitan_lite.parallel.parallelize import parallelize
from torchtitan_lite.parallel.tensor_parallel import float8_gathers
from torchtitan_lite.planner.meta_model import (
    build_meta_model,
    device_rates,
    predict_step,
    resolve_checkpointing,
)


def build_batches(
    config: Config,
    tokenizer: Tokenizer,
    sizes: BatchSizes,
    *,
    vocab_size: int,
    dp_rank: int,
    dp_degree: int,
    progress: Progress,
) -> tuple[TrainingBatches, ValidationBatches | None]:
    """What a data-parallel rank trains on after `progress`, and what it validates on where that is
    enabled, which is held out of the training data where both are of the same store. Raises
    DataError for data that is not that of the progress, or not the same on all ranks, and
    ConfigError where it ends the run within the schedule's phases."""
    training, validation = config.training, config.validation
    shape = {"seq_len": training.seq_len, "vocab_size": vocab_size, "seed": config.debug.seed}
    stores = open_stores(training, tokenizer)
    check_same_tokens(stores)
    mixture = Mixture(resolve_shares(training.datasets))
    validated = validation.steps * training.local_batch_size if validation.enable else 0
    held_out = mixture.counts(validated).tolist()
    other: Corpus | None = None
    if validation.enable and (validation.dataset or validation.dataset_path):
        store = open_store(
            "validation",
            validation.dataset_path,
            text_field=training.text_field,
            tokenizer=tokenizer,
        )
        check_same_tokens({"validation": store})
        held_out = [
            validated if store.fingerprint == each.fingerprint else 0 for each in stores.values()
        ]
        other = Corpus(
            {"validation": store}, Mixture((1,)), held_out=[validated], trained=0, **shape
        )
    # What was held out stays so, because the order of the others depends on how many they are.
    held_out = [
        max(count, progress.held_out(number)) for number, count in enumerate(held_out, start=1)
    ]
    corpus = Corpus(stores, mixture, held_out=held_out, trained=1, **shape)
    if progress.step:
        check_same_data(progress, corpus.identity(), allow_change=training.allow_data_change)
    batches = TrainingBatches(
        corpus,
        sizes,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
        steps=training.steps,
        epochs=training.epochs,
        first_step=progress.step + 1,
        first_sample=progress.samples,
    )
    if problems := list(check_decay(config.lr_scheduler, steps=batches.last_step)):
        raise ConfigError(
            f"{problems[0]}; [training] epochs = {training.epochs} end the run there."
        )
    log_data(batches, training)
    if not validation.enable:
        return batches, None
    return batches, ValidationBatches(
        other or corpus,
        local_batch_size=training.local_batch_size,
        steps=validation.steps,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
    )


def open_store(
    table: str, path: str | None, *, text_field: str, tokenizer: Tokenizer
) -> TokenStore:
    """The store that a table's dataset_path names, or its dataset where that is None."""
    setting = (
        f'[{table}] dataset = "pystdlib"' if path is None else f'[{table}] dataset_path = "{path}"'
    )
    return open_data(path, text_field=text_field, tokenizer=tokenizer, setting=setting)


def open_stores(training: TrainingConfig, tokenizer: Tokenizer) -> dict[str, TokenStore]:
    """The stores to train on by name: the last part of the path, after its number in the list where
    two are alike. Raises DataError where two hold the same tokens."""
    text_field = training.text_field
    if not training.datasets:
        store = open_store(
            "training", training.dataset_path, text_field=text_field, tokenizer=tokenizer
        )
        return {Path(training.dataset_path or training.dataset).resolve().name: store}
    names = [Path(dataset.path).resolve().name for dataset in training.datasets]
    names = [
        f"{number}-{name}" if names.count(name) > 1 else name
        for number, name in enumerate(names, start=1)
    ]
    stores: dict[str, TokenStore] = {}
    numbers: dict[str, int] = {}
    for number, (name, dataset) in enumerate(zip(names, training.datasets, strict=True), start=1):
        setting = f'[[training.datasets]] {number}: path = "{dataset.path}"'
        stores[name] = open_data(
            dataset.path, text_field=text_field, tokenizer=tokenizer, setting=setting
        )
        if (first := numbers.setdefault(stores[name].fingerprint, number)) != number:
            raise DataError(
                f"{setting} holds the same tokens as {first}; list it once, with the sum of the weights"
            )
    return stores


def check_same_tokens(stores: Mapping[str, TokenStore]) -> None:
    """Raise DataError, on every rank, unless all ranks have the same tokens in each store. A
    collective call."""
    fingerprints: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(fingerprints, [store.fingerprint for store in stores.values()])
    for name, of_ranks in zip(stores, zip(*fingerprints, strict=True), strict=True):
        if others := [
            rank for rank, fingerprint in enumerate(of_ranks) if fingerprint != of_ranks[0]
        ]:
            raise DataError(
                f"{name}: rank 0 has other tokens than {len(others)} of {len(of_ranks)} ranks, the first of them "
                f"{others[0]}; train on one copy of the text, and for pystdlib with the same Python on every node."
            )


def check_same_data(
    progress: Progress, identity: Mapping[str, int | str], *, allow_change: bool
) -> None:
    """Raise DataError if the data of a run to be resumed has changed, unless that is allowed. A new
    name is told of."""
    before = progress.data
    changed = [key for key in {**before, **identity} if before.get(key) != identity.get(key)]
    if not changed:
        return
    changes = "; ".join(
        f"{key}: {before.get(key, 'none')} -> {identity.get(key, 'none')}" for key in changed
    )
    if allow_change or all(key.endswith(" name") for key in changed):
        logger.info(
            f"since step {progress.step} the data has changed; on at sample {progress.samples:,}: {changes}"
        )
        return
    raise DataError(
        f"[training] allow_data_change = false, and the data is not what step {progress.step} was trained on: "
        f"{changes}. Undo that, or set it to true, to go on at sample {progress.samples:,} of the new order. "
        "([validation] steps * [training] local_batch_size are held out; what is newly so may have been trained on.)"
    )


def log_data(batches: TrainingBatches, training: TrainingConfig) -> None:
    """Say what the stores of a run hold, how often it will pass each, and what will end it."""
    corpus, last_step = batches.corpus, batches.last_step
    epochs = corpus.epochs(batches.samples(last_step))
    for windows, share in zip(
        corpus.windows, corpus.mixture.shares / corpus.mixture.period, strict=True
    ):
        logger.info(
            f"{windows.name}: {windows.store.documents:,} documents, {windows.store.tokens:,} tokens, {share:.2%} of "
            f"the samples; an epoch is {windows.epoch_size:,} windows of {training.seq_len}, {windows.held_out:,} more "
            f"are held out for validation; {epochs[windows.name]:.4g} epochs up to step {last_step:,}"
        )
    if batches.left_over is not None:
        logger.info(
            f"[training] epochs = {training.epochs:g} end the run at step {last_step:,} of {training.steps:,}; "
            f"{batches.left_over:,} samples are left over, fewer than a step takes"
        )
    elif training.epochs is not None:
        logger.info(
            f"[training] steps = {training.steps} end the run, before {training.epochs:g} epochs do"
        )


def choose_attention(
    config: Config, args: ModelArgs, *, tp_degree: int, device: torch.device
) -> str:
    """What is to compute attention: on a GPU the fastest of what can, as rank 0 finds it, and
    elsewhere, or where runs are to be the same by the bit, what PyTorch chooses. A collective
    call."""
    kind = {
        "tp_degree": tp_degree,
        "dtype": getattr(torch, config.training.mixed_precision_param),
        "device": device,
    }
    chosen = attention_backend(args, **kind)
    if device.type == "cpu" or config.debug.deterministic or chosen == "FLEX_ATTENTION":
        return chosen
    batch_size = config.training.local_batch_size
    seconds = on_rank0(
        lambda: time_backends(*attention_inputs(args, batch_size=batch_size, **kind))
    )
    if not seconds:
        return chosen
    fastest = min(seconds, key=seconds.__getitem__)
    prefer_backend(fastest)
    logger.info(
        f"attention, forward and backward: {', '.join(f'{name} {1e3 * s:.2f} ms' for name, s in seconds.items())}"
    )
    return fastest


def build_model(
    config: Config, args: ModelArgs, *, mesh: DeviceMesh, device: torch.device
) -> tuple[Transformer, FlopsLedger, Asked]:
    """The model, converted, sharded and initialised, the FLOPs of a token counted before it was
    sharded, and what of float8 a step is to show."""
    training, float8, tp = config.training, config.float8, mesh["tp"].size()
    attention = choose_attention(config, args, tp_degree=tp, device=device)
    spec = lookup_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    rates = device_rates(spec, config.metrics)
    degrees = resolve_degrees(config.parallelism, world_size=mesh.size())
    build = partial(
        build_meta_model,
        args=args,
        tp_degree=tp,
        emulate=float8.enable_float8_linear and resolve_emulate(float8, device=device),
        fused_attention=attention != "MATH",
        rates=rates,
    )
    config, meta = resolve_checkpointing(
        config,
        args,
        build,
        degrees=degrees,
        memory_gib=min(
            on_all_ranks(lambda: total_memory_gib(device) or host_memory_gib() / local_world_size())
        ),
        on_cpu=device.type == "cpu",
    )
    model, ledger = meta.model, meta.ledger
    asked = asked_of_step(config, meta.choices, degrees=degrees, ledger=ledger)
    logger.info(
        f"Llama 3 {config.model.flavor}: {meta.parameters:,} parameters, "
        f"vocabulary {args.vocab_size}; attention by {attention}"
    )
    if float8.enable_float8_linear:
        if config.compile.covers("model"):
            keep_shared_casts()
        log_float8(config, meta.choices, asked, tp=tp)
        if rates is not None:
            logger.info(
                f"predicted: {predict_step(config, args, meta, degrees=degrees, rates=rates).verdict}"
            )
    parts = ", ".join(
        f"{count / ledger.total:.2%} {name}" for name, count in ledger.by_precision.items() if count
    )
    emulated = f" (float8, emulated, counts as {ledger.fp8_runs_in})" if ledger.emulated else ""
    again = (
        f"; {sum(ledger.recompute.values()) / ledger.total:.2%} more are recomputed"
        if meta.recomputed
        else ""
    )
    masked = "; attention counts as if documents were one" if training.document_mask else ""
    logger.info(f"{ledger.total:,} FLOPs per token: {parts}{emulated}{again}{masked}")
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
    return model, ledger, asked


def asked_of_step(
    config: Config,
    choices: Sequence[LinearChoice],
    *,
    degrees: ParallelDegrees,
    ledger: FlopsLedger,
) -> Asked:
    """What of float8 a step of `config`, with its linears as chosen, is to show on each rank."""
    float8 = config.float8
    microbatches = resolve_batch(config.training, dp_degree=degrees.dp).grad_accum_steps
    converted = {choice.name for choice in choices if choice.converted}
    blocks = {choice.name.split(".")[1] for choice in choices if choice.name != OUTPUT}
    groups = {
        tuple(name.split(".")[:2]) for name in converted
    }  # that FSDP gathers at once: a block, or the last one
    gathers_weights = float8.enable_fsdp_float8_all_gather and degrees.dp_shard > 1
    gathers_activations = float8.recipe_name == "tensorwise" and degrees.tp > 1
    return Asked(
        linears=len(converted),
        matmuls=microbatches
        * len(converted)
        * (2 if float8.recipe_name == "rowwise_with_gw_hp" else 3),
        matmuls_run_in={"fp8": "float8", "bf16": "bfloat16", "fp32": "float32"}[ledger.fp8_runs_in],
        fsdp_gathers=len(groups) if gathers_weights else 0,
        tp_gathers=microbatches * float8_gathers(converted) if gathers_activations else 0,
        # The compiler is not told which of those it finds to fuse; a block of which it finds none
        # is not as it was.
        fused=microbatches * len(blocks) if config.parallelism.enable_async_tensor_parallel else 0,
    )


def log_float8(config: Config, choices: Sequence[LinearChoice], asked: Asked, *, tp: int) -> None:
    """Say which linears train in float8, and in what tensor parallelism gathers activations."""
    recipe, dtype = config.float8.recipe_name, config.training.mixed_precision_param
    logger.info(f"float8, {recipe}:\n{format_choices(choices)}")
    if asked.tp_gathers:
        logger.info(
            f"tensor parallelism gathers {asked.tp_gathers} activations and gradients a step in float8, the others in "
            f"{dtype}"
        )
    elif tp > 1:
        logger.info(
            f"tensor parallelism gathers all activations in {dtype}: float8 needs linears that share an input to have "
            f'recipe_name = "tensorwise", one scale for what is gathered'
        )


def build_checkpointer(
    config: Config,
    args: ModelArgs,
    *,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    device: torch.device,
) -> Checkpointer:
    """What saves and loads the run's state, in its run folder."""
    assert mesh.mesh_dim_names is not None, "build_mesh names its dimensions"
    return Checkpointer(
        model,
        optimizer,
        config.checkpoint,
        folder=Path(config.job.dump_folder) / config.checkpoint.folder,
        device=device,
        mesh=dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)),
        model_args=asdict(args),
        config_toml=dump_config(config),
    )


def hparams(config: Config, *, world_size: int) -> dict[str, bool | float | str]:
    """What is worth comparing between runs. TensorBoard shows the first five, by the alphabet,
    until asked for more."""
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
    config: Config,
    ledger: FlopsLedger,
    *,
    device: torch.device,
    total_steps: int,
    progress: Progress,
) -> MetricsProcessor:
    """The metrics of a run that goes on after `progress`, up to step `total_steps`; rank 0 alone
    writes. On CPU all ranks measure their peaks here, at the same time."""
    dist.barrier()
    precisions = {precision for precision, count in ledger.by_precision.items() if count}
    if has_float8_units(device):
        precisions |= {"bf16", "fp8"}
    peaks = resolve_peaks(
        device,
        config.metrics,
        precisions=precisions,
        file=Path(config.job.dump_folder) / "peaks.json",
    )
    logger.info(f"{peaks}")
    writers: list[Writer] = []
    on_rank0(
        lambda: writers.extend(
            build_writers(
                config.metrics,
                dump_folder=Path(config.job.dump_folder),
                total_steps=total_steps,
                resume_step=progress.step,
                config_toml=dump_config(config),
                hparams=hparams(config, world_size=dist.get_world_size()),
                numerics=config.float8.log_numerics_freq > 0,
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
        start_tokens=progress.tokens,
    )
    if config.compile.enable:
        on_compile_start(lambda _: metrics.compile_began())
        on_compile_end(lambda _: metrics.compile_ended())
    return metrics
