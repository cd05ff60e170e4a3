"""The facts of a run, derived from its config."""

import dataclasses

import pytest
from sample_jobs import TOKENIZER

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.config import Config, load_config
from torchtitan_lite.config.job import Job, build_job

# ----- build_job -----


def job_of(*, world_size: int = 1, vocab_size: int = 2256, **tables: dict[str, object]) -> Job:
    tokenizer = dataclasses.replace(TOKENIZER, vocab_size=vocab_size)
    config = Config.model_validate(tables)
    return build_job(config, world_size=world_size, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("flavor", "vocab_size"), [("debugmodel", 2256), ("8B", 128256), ("405B", 128256)]
)
def test_vocabulary_is_the_flavors_or_else_the_tokenizers(flavor, vocab_size):
    args = job_of(model={"flavor": flavor}, training={"seq_len": 4096}).model_args
    assert (args.vocab_size, args.max_seq_len) == (vocab_size, 4096)


@pytest.mark.parametrize(("enable", "longest"), [(True, 96), (False, 64)])
def test_build_job_covers_the_sequences_of_validation(enable, longest):
    validation = {"enable": enable, "seq_len": 96}
    assert job_of(training={"seq_len": 64}, validation=validation).model_args.max_seq_len == longest
    shorter = validation | {"seq_len": 32}
    assert job_of(training={"seq_len": 64}, validation=shorter).model_args.max_seq_len == 64


def test_with_a_document_mask_documents_begin_at_the_tokenizers_bos():
    assert job_of().model_args.document_bos_id is None
    assert job_of(training={"document_mask": True}).model_args.document_bos_id == 1


def test_a_tokenizer_with_more_ids_than_the_model_is_refused():
    assert job_of(vocab_size=128256, model={"flavor": "8B"}).model_args.vocab_size == 128256
    message = r"\[model\] tokenizer_path = 'some.model' has 128257 ids, more than .* 128256"
    with pytest.raises(ConfigError, match=message):
        job_of(vocab_size=128257, model={"flavor": "8B"})


def test_degrees_batches_and_shares_follow_from_the_config():
    job = job_of(
        world_size=24,
        training={
            "seq_len": 96,
            "local_batch_size": 2,
            "global_batch_size": 16,
            "datasets": [{"path": "a", "weight": 3.0}, {"path": "b"}],
        },
        parallelism={
            "tensor_parallel_degree": 2,
            "context_parallel_degree": 3,
            "data_parallel_replicate_degree": 2,
        },
    )
    assert dataclasses.astuple(job.degrees) == (2, 2, 3, 2, 1)
    assert job.microbatch_tokens == 2 * 96 / 3
    assert dataclasses.astuple(job.batch) == (2, 16, 2)
    assert job.dataset_shares == (3, 1)


# ----- choose -----
def test_chosen_values_are_written_and_load_again(tmp_path):
    job = job_of(activation_checkpoint={"mode": "auto"})
    chosen = job.choose("activation_checkpoint", mode="selective", selective_ac_option="2")
    assert chosen.config.activation_checkpoint.mode == "selective"

    path = tmp_path / "config.toml"
    path.write_text(chosen.config.to_toml())
    assert load_config(["--job.config_file", str(path)], world_size=1) == chosen.config
