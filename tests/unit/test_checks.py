"""Rules between keys of the config."""

import pytest

from torchtitan_lite.config import Config, check_config, checks


def check(
    world_size: int = 1, unsound: tuple[str, ...] = (), **tables: dict[str, object]
) -> list[str]:
    return check_config(Config.model_validate(tables), world_size=world_size, unsound=unsound)


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"model": {"flavor": "405B"}, "training": {"seq_len": 131072}},
        {"training": {"steps": 20}, "lr_scheduler": {"warmup_steps": 200, "decay_ratio": 0.1}},
        {"training": {"steps": 250}, "lr_scheduler": {"warmup_steps": 200, "decay_ratio": 0.2}},
        {"activation_checkpoint": {"selective_ac_option": "6"}},
        {"training": {"dtype": "bfloat16"}, "optimizer": {"implementation": "foreach"}},
        {"training": {"dtype": "bfloat16"}, "optimizer": {"state_dtype": "bfloat16"}},
        {"compile": {"components": []}},
        {"float8": {"enable_fsdp_float8_all_gather": True, "recipe_name": "rowwise"}},
        {"float8": {"precompute_float8_dynamic_scale_for_fsdp": True}},
        {
            "validation": {"dataset": "c4_validation", "dataset_path": "c4", "steps": -1},
            "training": {"dataset": "pystdlib", "dataset_path": "x.txt"},
        },
        {
            "profiling": {
                "save_traces_folder": "profiling/traces",
                "save_memory_snapshot_folder": "profiling/memory",
            }
        },
    ],
)
def test_sound_configs(tables: dict[str, dict[str, object]]) -> None:
    assert check(**tables) == []


@pytest.mark.parametrize(
    ("world_size", "tables", "message"),
    [
        (
            6,
            {"parallelism": {"context_parallel_degree": 4}},
            "[parallelism] data_parallel_replicate_degree * pipeline_parallel_degree * "
            "context_parallel_degree * tensor_parallel_degree = 1 * 1 * 4 * 1 = 4 does not divide "
            "the world size, 6; run 4 or 8 processes",
        ),
        (
            2,
            {"parallelism": {"context_parallel_degree": 2, "data_parallel_shard_degree": 2}},
            "[parallelism] data_parallel_shard_degree * data_parallel_replicate_degree * "
            "pipeline_parallel_degree * context_parallel_degree * tensor_parallel_degree = "
            "2 * 1 * 1 * 2 * 1 = 4, but the run has 2 processes; "
            "set data_parallel_shard_degree to 1 or -1",
        ),
        (
            4,
            {
                "training": {"seq_len": 2050},
                "parallelism": {"context_parallel_degree": 2, "tensor_parallel_degree": 2},
            },
            "[training] seq_len = 2050 is not a multiple of [parallelism] 2 * "
            "context_parallel_degree * tensor_parallel_degree = 2 * 2 * 2 = 8, into which "
            "sequences are split; use 2048 or 2056",
        ),
        (
            4,
            {"training": {"seq_len": 4}, "parallelism": {"context_parallel_degree": 4}},
            "[training] seq_len = 4 is not a multiple of [parallelism] 2 * "
            "context_parallel_degree * tensor_parallel_degree = 2 * 4 * 1 = 8, into which "
            "sequences are split; use 8 or 16",
        ),
        (
            3,
            {"parallelism": {"tensor_parallel_degree": 2}},
            "[parallelism] data_parallel_replicate_degree * pipeline_parallel_degree * "
            "context_parallel_degree * tensor_parallel_degree = 1 * 1 * 1 * 2 = 2 does not divide "
            "the world size, 3; run 2 or 4 processes",
        ),
        (
            2,
            {"training": {"global_batch_size": 24}},
            "[training] global_batch_size = 24 is not a multiple of local_batch_size * dp_degree "
            "= 8 * 2 = 16; "
            "use 16 or 32",
        ),
        (
            1,
            {"model": {"flavor": "8b"}},
            '[model] flavor = "8b" must be one of "debugmodel", "debugmodel_gqa", "150M", "350M", '
            '"1B", "3B", "8B", "70B", "405B", "3-8B", "3-70B", or "" for none; did you mean "8B"?',
        ),
        (
            16,
            {"model": {"flavor": "8B"}, "parallelism": {"tensor_parallel_degree": 16}},
            "[parallelism] tensor_parallel_degree = 16 must divide n_heads = 32, n_kv_heads = 8, "
            "dim = 4096 and "
            'ffn_dim = 14336 of [model] flavor = "8B"; use one of 1, 2, 4, 8',
        ),
        (
            2,
            {"training": {"seq_len": 2047}, "parallelism": {"tensor_parallel_degree": 2}},
            "[training] seq_len = 2047 is not a multiple of [parallelism] tensor_parallel_degree "
            "= 2, into which sequences are split; use 2046 or 2048",
        ),
        (
            1,
            {"model": {"flavor": "3-8B"}, "training": {"seq_len": 16384}},
            '[training] seq_len = 16384 is above max_seq_len = 8192 of [model] flavor = "3-8B"; '
            "use at most 8192, or set rope_theta or rope_scaling for longer sequences",
        ),
        *(
            (
                1,
                {"activation_checkpoint": {"selective_ac_option": option}},
                f'[activation_checkpoint] selective_ac_option = "{option}" must be "op", or a '
                f'number from "1" to "6", '
                'the n_layers of [model] flavor = "debugmodel"',
            )
            for option in ("0", "7", "-1", "2.0", "ops", "٣")
        ),
        (
            1,
            {"activation_checkpoint": {"mode": "none", "selective_ac_option": "x"}},
            '[activation_checkpoint] selective_ac_option = "x" must be "op", or a number from "1" '
            'to "6", the n_layers of [model] flavor = "debugmodel"',
        ),
        (
            1,
            {"training": {"steps": 250}, "lr_scheduler": {"warmup_steps": 200, "decay_ratio": 0.5}},
            "[lr_scheduler] decay_ratio = 0.5 of 250 steps = 125 steps, but warmup_steps = 200 "
            "leaves 50; "
            "use decay_ratio <= 0.2 or warmup_steps <= 125",
        ),
        (
            1,
            {"lr_scheduler": {"total_steps": 3, "warmup_steps": 1, "decay_ratio": 1.0}},
            "[lr_scheduler] decay_ratio = 1.0 of 3 steps = 3 steps, but warmup_steps = 1 leaves 2; "
            "use decay_ratio <= 0.666 or warmup_steps <= 0",
        ),
        (
            1,
            {"compile": {"enable": True, "components": []}},
            '[compile] components = [] leaves nothing to compile; use ["model", "loss"], or set '
            "enable to false",
        ),
        (
            1,
            {
                "float8": {
                    "enable_float8_linear": True,
                    "recipe_name": "rowwise",
                    "enable_fsdp_float8_all_gather": True,
                }
            },
            '[float8] enable_fsdp_float8_all_gather = true needs recipe_name = "tensorwise", not '
            '"rowwise"; '
            "set it to false, or change the recipe",
        ),
        (
            1,
            {"float8": {"enable_float8_linear": True, "scale_gradients_in_matmul": True}},
            "[float8] scale_gradients_in_matmul = true changes nothing under recipe_name = "
            '"tensorwise"; set it to false, or the recipe to "rowwise" or "rowwise_with_gw_hp"',
        ),
        (
            1,
            {
                "float8": {
                    "enable_float8_linear": True,
                    "recipe_name": "rowwise_with_gw_hp",
                    "pad_inner_dim": True,
                }
            },
            '[float8] pad_inner_dim = true pads nothing under recipe_name = "rowwise_with_gw_hp"; '
            "set it to false, "
            'or the recipe to "tensorwise" or "rowwise"',
        ),
        (
            1,
            {
                "float8": {
                    "enable_float8_linear": True,
                    "recipe_name": "mxfp8",
                    "pad_inner_dim": True,
                }
            },
            '[float8] pad_inner_dim = true is not offered by torchao under recipe_name = "mxfp8"; '
            "set it to false, "
            'or the recipe to "tensorwise" or "rowwise"',
        ),
        (
            1,
            {
                "float8": {
                    "enable_float8_linear": True,
                    "recipe_name": "mxfp8",
                    "log_numerics_freq": 5,
                }
            },
            "[float8] log_numerics_freq = 5 measures casts with a scale for a tensor or a row, "
            "not those of "
            'recipe_name = "mxfp8"; set it to 0, or change the recipe',
        ),
        (
            1,
            {
                "float8": {"enable_float8_linear": True, "recipe_name": "mxfp8"},
                "training": {"mixed_precision_param": "float32"},
            },
            '[training] mixed_precision_param = "float32" cannot be cast by the kernels of '
            '[float8] recipe_name = "mxfp8"; '
            'use "bfloat16", or another recipe',
        ),
        (
            1,
            {"parallelism": {"enable_async_tensor_parallel": True}, "compile": {"enable": True}},
            "[parallelism] enable_async_tensor_parallel = true needs tensor_parallel_degree of 2 "
            "or more, not 1; "
            "set that, or set it to false",
        ),
        (
            2,
            {"parallelism": {"enable_async_tensor_parallel": True, "tensor_parallel_degree": 2}},
            "[parallelism] enable_async_tensor_parallel = true is done by the compiler; set "
            "[compile] enable = true, "
            'with "model" among its components, or set it to false',
        ),
        (
            1,
            {
                "float8": {
                    "enable_float8_linear": True,
                    "precompute_float8_dynamic_scale_for_fsdp": True,
                }
            },
            "[float8] precompute_float8_dynamic_scale_for_fsdp = true needs "
            "enable_fsdp_float8_all_gather = true; "
            "set both to the same",
        ),
        (
            1,
            {
                "float8": {
                    "enable_float8_linear": True,
                    "enable_fsdp_float8_all_gather": True,
                    "precompute_float8_dynamic_scale_for_fsdp": True,
                },
                "training": {"enable_cpu_offload": True},
            },
            "[float8] precompute_float8_dynamic_scale_for_fsdp = true has no effect with "
            "[training] "
            "enable_cpu_offload = true: a weight comes to the GPU without its scale; set one of "
            "them to false",
        ),
        (
            1,
            {"validation": {"prompts": ["a"]}},
            '[validation] prompts = ["a"] needs enable = true; set that, or remove them',
        ),
        (
            1,
            {"validation": {"steps": 0}},
            "[validation] steps = 0 validates nothing; use 1 or more, -1 for all data, or disable",
        ),
        *(
            (
                1,
                {"checkpoint": {"folder": folder}},
                f'[checkpoint] folder = "{folder}" must be a name within [job] dump_folder, like '
                f'"traces"',
            )
            for folder in ("/tmp/x", "../x", "a/../../x", ".")
        ),
        (
            1,
            {"checkpoint": {"save_request_file": "checkpoint"}},
            '[checkpoint] save_request_file = "checkpoint" is also the name of [checkpoint] '
            "folder; choose another",
        ),
        (
            1,
            {"checkpoint": {"initial_load_path": "/base"}},
            '[checkpoint] initial_load_path = "/base" needs enable = true; set that, or unset it',
        ),
        (
            1,
            {"checkpoint": {"export_dtype": "bfloat16"}},
            '[checkpoint] export_dtype = "bfloat16" is for the save of last_save_model_only = '
            "true, which is torchtitan's default, or of last_save_in_hf = true; set one of these, "
            "or unset it",
        ),
        (
            1,
            {
                "checkpoint": {
                    "enable": True,
                    "initial_load_path": "/base",
                    "initial_load_in_hf": True,
                    "initial_load_model_only": False,
                }
            },
            "[checkpoint] initial_load_model_only = false, but with initial_load_in_hf = true "
            "there are only weights to load; set it to true",
        ),
        (
            1,
            {"checkpoint": {"last_save_in_hf": True}},
            "[checkpoint] last_save_in_hf = true needs enable = true; set that, or unset it",
        ),
        (
            1,
            {"checkpoint": {"enable": True, "last_save_in_hf": True, "load_only": True}},
            "[checkpoint] last_save_in_hf = true saves, and load_only = true does not; unset one",
        ),
        (
            1,
            {"checkpoint": {"enable": True, "initial_load_in_hf": True}},
            "[checkpoint] initial_load_in_hf = true has no folder to load; set initial_load_path, "
            "or [model] tokenizer_path to the folder of the Hugging Face model",
        ),
        (
            1,
            {"activation_checkpoint": {"mode": "memory_budget"}},
            '[activation_checkpoint] mode = "memory_budget" is for the compiler; set [compile] '
            "enable = true, with "
            '"model" among its components, or the mode to "selective"',
        ),
        (
            1,
            {"optimizer": {"state_dtype": "bfloat16", "implementation": "foreach"}},
            '[optimizer] implementation = "foreach" keeps its moments in the data type of the '
            'weights, and state_dtype = "bfloat16"; set implementation to "fused", or unset '
            "state_dtype",
        ),
        (
            1,
            {"optimizer": {"state_dtype": "float32"}, "training": {"dtype": "bfloat16"}},
            '[optimizer] state_dtype = "float32" needs [training] dtype = "float32" too, not '
            '"bfloat16": moments are no wider than weights; unset one of them',
        ),
        (
            1,
            {"profiling": {"profiler_active": 11}},
            "[profiling] profiler_active = 11 is above profile_freq = 10, the steps of a period; "
            "use at most that",
        ),
        (
            1,
            {"comm": {"save_traces_folder": "profile_traces"}},
            '[comm] save_traces_folder = "profile_traces" is also the name of [profiling] '
            "save_traces_folder; choose another",
        ),
        (
            1,
            {"training": {"loss_spike_factor": 1.0}},
            "[training] loss_spike_factor = 1.0 makes each loss near the mean of the others a "
            "spike; use a factor "
            "above 1, like 3, or 0 for none",
        ),
        (
            1,
            {"metrics": {"save_tb_folder": "logs/tb"}},
            '[metrics] save_tb_folder = "logs/tb" is a name that every run uses itself; choose '
            "another",
        ),
        (
            1,
            {"profiling": {"save_traces_folder": "./tb/"}},
            '[profiling] save_traces_folder = "./tb/" is also the name of [metrics] '
            "save_tb_folder; choose another",
        ),
        (
            1,
            {"checkpoint": {"folder": "tb/checkpoint"}},
            '[checkpoint] folder = "tb/checkpoint" is within [metrics] save_tb_folder = "tb"; '
            "choose another",
        ),
        (
            1,
            {"comm": {"save_traces_file_prefix": "../x"}},
            '[comm] save_traces_file_prefix = "../x" must not hold /; the folder is [comm] '
            "save_traces_folder",
        ),
    ],
)
def test_broken_rule(
    world_size: int,
    tables: dict[str, dict[str, object]],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        checks, "version", lambda package: "2.13.0"
    )  # an older torch breaks a rule more
    assert check(world_size, **tables) == [message]


def test_all_broken_rules_are_named_together() -> None:
    messages = check(
        3,
        model={"flavor": "7B"},
        training={"global_batch_size": 25},
        compile={"enable": True, "components": []},
    )
    assert [message.split("]")[0] for message in messages] == ["[training", "[model", "[compile"]


def test_rules_on_unsound_tables_are_left_out() -> None:
    broken = {"model": {"flavor": "7B"}, "compile": {"enable": True, "components": []}}
    assert len(check(**broken)) == 2
    assert [message.split("]")[0] for message in check(unsound=("model",), **broken)] == [
        "[compile"
    ]


MEMORY_BUDGET = {"activation_checkpoint": {"mode": "memory_budget"}, "compile": {"enable": True}}


@pytest.mark.parametrize(
    ("torch_version", "tp", "message"),
    [
        (
            "2.11.0+cu130",
            1,
            "of torch 2.11.0+cu130 where n_kv_heads = 8 is not n_heads = 16, as in [model] flavor "
            "= ",
        ),
        ("2.12.1", 1, None),
        (
            "2.12.1",
            2,
            "of torch 2.12.1 under [parallelism] tensor_parallel_degree = 2; install torch 2.13, "
            "or set ",
        ),
        ("2.13.0a0+git1234", 2, None),
    ],
)
def test_a_memory_budget_is_refused_where_it_crashes_the_compiler(
    torch_version: str, tp: int, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "version", lambda package: torch_version)
    found = check(
        2,
        parallelism={"tensor_parallel_degree": tp},
        model={"flavor": "debugmodel_gqa"},
        **MEMORY_BUDGET,
    )
    assert len(found) == (message is not None)
    if message:
        assert found[0].startswith(
            f'[activation_checkpoint] mode = "memory_budget" crashes the compiler {message}'
        )


def test_a_memory_budget_works_with_torch_2_11_where_each_head_has_its_own_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "version", lambda package: "2.11.0")
    tables = {"parallelism": {"tensor_parallel_degree": 2}, "model": {"flavor": "debugmodel"}}
    assert check(2, **tables, **MEMORY_BUDGET) == []
