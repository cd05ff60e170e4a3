"""The course of a run beside that of the run that it resumes."""

import pytest

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.config import Config, Course, keep_batch, read_decisive

# ----- read_decisive -----


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
    assert read_decisive(toml, world_size=world_size).training.global_batch_size == expected


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


# ----- Course -----


def course(*, steps: int = 30, batch: int = 8, **schedule: object) -> Course:
    tables = {"optimizer": {"lr": 1.0}, "lr_scheduler": {"warmup_steps": 0, **schedule}}
    return Course(Config.model_validate(tables), batch, steps)


@pytest.mark.parametrize(("before", "now", "expected"), [
    (course(), course(), []),
    (course(total_steps=30), course(), []),
    (course(batch=4), course(batch=8), ["global batch: 4 sequences -> 8 sequences"]),
    (course(total_steps=50), course(steps=40, total_steps=50), []),
    (course(), course(steps=40), ["learning rate in step 30: 0.0323 -> 0.268"]),
    (course(decay_ratio=0.0), course(steps=40, decay_ratio=0.25), []),  # from step 31 on
    (course(total_steps=40), course(decay_ratio=0.0, total_steps=40),
     ["learning rate in step 30: 0.268 -> 1"]),
])  # fmt: skip
def test_changes_of_the_course_are_named(before, now, expected):
    assert now.changes(before, step=30) == expected
