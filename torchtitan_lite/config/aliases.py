"""Names that earlier torchtitan releases used for a key. They still load, with a notice of the
current name."""

from torchtitan_lite.logger import logger

from .keys import Layer, Setting, show_key

CONVERTERS = "model.converters"
ALIASES = {
    CONVERTERS: "float8.enable_float8_linear",
    "job.print_args": "job.print_config",
    "model.hf_assets_path": "model.tokenizer_path",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.deterministic": "debug.deterministic",
    "training.seed": "debug.seed",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
}
FLOAT8_CONVERTERS = (["float8"], ["quantize.linear.float8"], "float8", "quantize.linear.float8")
NO_CONVERTERS: tuple[object, ...] = ([], "")
OLD_FLOAT8_TABLE = "quantize.linear.float8"


def current_name(name: str) -> str:
    """Return the current dotted name of a key or table."""
    if name == OLD_FLOAT8_TABLE or name.startswith(f"{OLD_FLOAT8_TABLE}."):
        return "float8" + name.removeprefix(OLD_FLOAT8_TABLE)
    return ALIASES.get(name, name)


def resolve_aliases(layer: Layer) -> tuple[Layer, list[str]]:
    """Return the settings of one source under current names, and a message for each that cannot be
    translated."""
    resolved = {name: setting for name, setting in layer.items() if current_name(name) == name}
    problems = []
    for name, old in layer.items():
        if name in resolved:
            continue
        new = current_name(name)
        logger.info(f"{show_key(name)} is now {show_key(new)}")
        value = old.value
        if name == CONVERTERS:
            if value not in (*NO_CONVERTERS, *FLOAT8_CONVERTERS):
                problems.append(
                    f'{old.cite(name)}: must be ["float8"], ["quantize.linear.float8"] or []'
                )
                continue
            value = value in FLOAT8_CONVERTERS
        rival = resolved.setdefault(new, Setting(value, f"{old.source}, as {show_key(name)}"))
        if rival.value != value:
            problems.append(f"{old.cite(name)}: contradicts {rival.cite(new)}; keep the latter")
    return resolved, problems
