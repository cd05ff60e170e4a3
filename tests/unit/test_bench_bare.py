from pathlib import Path

import pytest

from torchtitan_lite.benchmarks.bare import BareCost, check_comparable, warm_up_steps
from torchtitan_lite.benchmarks.estimates import Ratios
from torchtitan_lite.config import Config, load_config
from torchtitan_lite.errors import ConfigError

DEBUG_MODEL = Path(__file__).parents[2] / "train_configs/debug_model.toml"


def load(*words: str, world_size: int = 2) -> Config:
    return load_config(["--job.config_file", str(DEBUG_MODEL), *words], world_size=world_size)


def test_the_debug_model_can_be_compared() -> None:
    check_comparable(load(), world_size=2)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "--parallelism.tensor_parallel_degree=2",
            "tensor_parallel_degree = 2 is not the same in the bare loop; set it to 1.",
        ),
        (
            "--parallelism.data_parallel_replicate_degree=2",
            "data_parallel_replicate_degree = 2 is not the same in the bare loop",
        ),
        (
            "--activation_checkpoint.mode=auto",
            'mode = "auto" is not the same in the bare loop; set it to "none" or "selective"',
        ),
        (
            "--optimizer.state_dtype=int8",
            'state_dtype = "int8" is not the same in the bare loop; set it to "float32"',
        ),
        (
            "--training.enable_cpu_offload",
            "enable_cpu_offload = true is not the same in the bare loop; set it to false",
        ),
        (
            "--optimizer.implementation=foreach",
            'implementation = "foreach" is not the same in the bare loop; set it to "fused"',
        ),
        (
            "--parallelism.fsdp_reshard_after_forward=always",
            'after_forward = "always" is not the same in the bare loop; set it to "default"',
        ),
        (
            "--training.global_batch_size=32",
            "global_batch_size = 32: a step has 2 microbatches a rank, and the bare",
        ),
    ],
)
def test_what_the_bare_loop_has_not_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_comparable(load(word), world_size=2)


def test_a_loop_is_warm_before_a_block_is_timed() -> None:
    assert (warm_up_steps(1), warm_up_steps(5)) == (3, 5)


def test_the_cost_in_words() -> None:
    cost = BareCost(Ratios((0.98, 0.99, 1.0)), step_s=0.25, loss_gap=1.5e-6)
    assert str(cost) == (
        "the trainer's tokens/s over the bare loop's: 0.990, standard error 0.005, quartiles 0.985 to 0.995, from 3 "
        "pairs\na step of the bare loop takes 0.2500 s; the losses of the two differ by 1.5e-06 at most, relative"
    )
