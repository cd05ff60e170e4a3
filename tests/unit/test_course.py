"""The learning rates of a run, and the global batch size that a resume keeps."""

import pytest

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.config import Config, keep_batch, learning_rate, saved_batch

# ----- saved_batch -----


@pytest.mark.parametrize(
    ("toml", "world_size", "expected"),
    [
        ("[training]\nlocal_batch_size = 4\nglobal_batch_size = 24", 2, 24),
        ("[training]\nlocal_batch_size = 4", 6, 24),
        ("[training]\nlocal_batch_size = 4\n[parallelism]\ntensor_parallel_degree = 2", 6, 12),
        # Keys and values of other versions.
        ('[optimizer]\nstate_dtype = "int8"\n[training]\nlocal_batch_size = 4\nold = 1\n[a]', 2, 8),
    ],
)
def test_the_saved_batch_is_a_number(toml: str, world_size: int, expected: int) -> None:
    assert saved_batch(toml, world_size=world_size) == expected


# ----- keep_batch -----


@pytest.mark.parametrize(
    ("local", "total", "world_size", "kept"),
    [(4, -1, 2, -1), (4, -1, 1, 8), (2, -1, 2, 8), (4, 16, 2, 16), (2, -1, 4, -1)],
)
def test_the_saved_batch_is_kept_where_none_is_asked_for(local, total, world_size, kept, notices):
    training = {"local_batch_size": local, "global_batch_size": total}
    config = Config.model_validate({"training": training})
    assert keep_batch(config, saved=8, world_size=world_size).training.global_batch_size == kept
    said = "global_batch_size = -1 keeps the checkpoint's, 8, in 2 passes" in notices.text
    assert said == (kept == 8)


def test_a_batch_that_the_processes_cannot_make_is_refused() -> None:
    config = Config.model_validate({"training": {"local_batch_size": 4}})
    message = r"\[training\] global_batch_size = -1 .* 8, .* = 4 . 4 = 16; .* = 16 or 32"
    with pytest.raises(ConfigError, match=message):
        keep_batch(config, saved=8, world_size=4)


# ----- learning_rate -----
def test_the_schedule_ends_with_the_run_unless_it_has_its_own_total() -> None:
    def in_step_30(**schedule: object) -> float:
        tables = {"optimizer": {"lr": 2.0}, "lr_scheduler": {"warmup_steps": 0, **schedule}}
        return learning_rate(Config.model_validate(tables), 30, last_step=40)

    assert in_step_30(total_steps=30) < in_step_30() == in_step_30(total_steps=40)
    assert in_step_30(decay_ratio=0.0) == 2.0
