"""The figures of a pipeline's stages on two processes, against those of the whole job."""

from pathlib import Path

import pytest
from launching import train
from matrix import PP, SCHEDULES


# ----- bubble_pct, stage_mfu -----
@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_stages_add_up_to_the_job(tmp_path: Path, schedule: str) -> None:
    settings = ["--training.steps=4", "--metrics.peak_tflops_bf16=1.0", f"{PP}=2"]
    settings += ["--training.local_batch_size=1", "--training.global_batch_size=4"]
    records = train(tmp_path, *settings, *SCHEDULES[schedule], processes=2)
    assert [record["step"] for record in records if record["bubble_pct"] is not None] == [3, 4]
    for record in records[2:]:
        tokens = record["tokens"] / record["step"]
        training_s = record["step_time_s"] - record["data_time_s"]
        assert record["tps"] == pytest.approx(tokens / training_s / 2)

        # FLOPs of all stages in percent of a TFLOPS, and of the job.
        seconds, mfu = record["stage_time_s"], record["stage_mfu"]
        assert list(seconds) == [str(stage) for stage in range(2 if schedule == "1F1B" else 4)]
        of_stages = sum(mfu[stage] * seconds[stage] for stage in seconds)
        assert of_stages == pytest.approx(record["mfu"] * 2 * training_s)

        # Two ranks compute in parts of at most a whole step.
        assert 0 < record["bubble_pct"] < 100
        assert record["memory_max_rank"] in (0, 1)
        assert record["memory_max_gib"] >= 0.9 * record["memory_gib"]
