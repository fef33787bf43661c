import json
from pathlib import Path

import pytest

from trainer.config import Config
from trainer.config_load import (
    CONFIG_DIR,
    Override,
    dump_config,
    key_help,
    key_page,
    key_schemas,
    load_config,
    split_overrides,
)
from trainer.config_rules import resolve_config
from trainer.errors import UserError


def problems_of(function, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        function(*arguments)
    return caught.value.message()


def load_text(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return load_config(str(file))


def overridden(**keys) -> Config:
    return load_config(None, [Override(key.replace("__", "."), str(value)) for key, value in keys.items()])


@pytest.mark.parametrize(
    "text, expected",
    [
        ("[training]\nseq_lenn = 64", "unknown key training.seq_lenn (run.toml:2); did you mean training.seq_len?"),
        ("[trainning]\nsteps = 1", "unknown key trainning (run.toml:1); did you mean training?"),
        ("[training]\nlr = 1.0", "unknown key training.lr (run.toml:2); did you mean optimizer.lr?"),
        ("training.seq_lenn = 64", "unknown key training.seq_lenn (run.toml:1); did you mean training.seq_len?"),
        ("training = {steps = 1, seq_lenn = 64}", "unknown key training.seq_lenn (run.toml:1)"),
        ("[training.deep]\nx = 1", "unknown key training.deep (run.toml:1)"),
        ("[[training]]\nseq_lenn = 1", "training (run.toml:1) must be a table"),
        ("seed = 3", "unknown key seed (run.toml:1)"),
    ],
)
def test_b78_unknown_keys_name_the_nearest(tmp_path, text, expected):
    assert expected in problems_of(load_text, tmp_path, text)


def test_b78_unknown_override():
    message = problems_of(lambda: overridden(training__seq_lenn=64))
    assert "unknown key training.seq_lenn (from --training.seq_lenn=64); did you mean training.seq_len?" in message


def test_all_problems_at_once(tmp_path):
    message = problems_of(load_text, tmp_path, '[training]\nsteps = "ten"\nseq_lenn = 1\n[optimizer]\nlr = -1.0')
    assert message.count("error:") == 3
    assert 'training.steps = "ten" (run.toml:2): expected an integer, at least 1' in message
    assert "optimizer.lr = -1.0 (run.toml:5): expected a number, above 0" in message


@pytest.mark.parametrize(
    "text",
    [
        '[optimizer]\nlr = "3e-4"', "[training]\nsteps = 1e3", "[job]\nseed = 1.0", '[compile]\nenabled = "false"',
        '[parallel]\nbalance = "layers.2"', "[optimizer]\nlr = nan", "[optimizer]\nlr = inf", "[compile]\nenabled = 1",
        "[training]\nsteps = true", "[optimizer]\nbetas = [0.9]", "[optimizer]\nbetas = [0.9, 1.0]",
    ],
)  # fmt: skip
def test_b79_wrong_types_are_rejected_from_a_file(tmp_path, text):
    assert "expected" in problems_of(load_text, tmp_path, text)


def test_b79_integers_serve_as_numbers_and_the_command_line_is_toml(tmp_path):
    assert load_text(tmp_path, "[optimizer]\nlr = 1").optimizer.lr == 1.0
    config = overridden(
        optimizer__lr="1e-5", compile__enabled="false", optimizer__betas="[0.8, 0.9]", job__output_dir="2024"
    )
    assert config.optimizer.lr == 1e-5 and isinstance(config.optimizer.lr, float)
    assert config.compile.enabled is False
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.job.output_dir == "2024"
    for key, value in (("optimizer__lr", "fast"), ("compile__enabled", '"false"'), ("training__steps", "1e3")):
        assert "expected" in problems_of(lambda k=key, v=value: overridden(**{k: v}))


@pytest.mark.parametrize("key", [key for key, schema in key_schemas().items() if "integer" in json.dumps(schema)])
@pytest.mark.parametrize("value", [0, -1, 2**70])
def test_b80_numeric_keys_at_their_edges(key, value):
    """Each is either rejected by its key, or documented: 0 as off, -1 as the rest."""
    try:
        config = load_config(None, [Override(key, str(value))])
    except UserError as error:
        assert key in error.message()
        return
    schema = json.dumps(key_schemas()[key])
    section, name = key.split(".")
    assert getattr(getattr(config, section), name) == value and value != 2**70
    if value == 0 and "seed" not in key:
        assert any(word in schema for word in ("0: ", "dp_shard", "decay_steps")), (
            f"{key} = 0 is accepted but not explained"
        )


def test_overrides_in_both_forms_and_in_order():
    rest, overrides = split_overrides(
        ["--config", "x", "--parallel.tp", "2", "--training.steps=5", "--parallel.dp_shard", "-1"]
    )
    assert rest == ["--config", "x"]
    assert [override.shown for override in overrides] == [
        "--parallel.tp=2",
        "--training.steps=5",
        "--parallel.dp_shard=-1",
    ]
    assert load_config(None, [Override("job.seed", "1"), Override("job.seed", "2")]).job.seed == 2
    assert "needs a value" in problems_of(split_overrides, ["--parallel.tp"])


def test_schedule_names_in_any_case():
    assert overridden(parallel__schedule="interleaved1f1b").parallel.schedule == "Interleaved1F1B"
    assert overridden(parallel__schedule="gpipe").parallel.schedule == "GPipe"


def test_resolved_config_reads_back_to_the_same(tmp_path):
    config = overridden(parallel__balance="[2, 4]", data__path="a b.txt", data__source="text", parallel__pp=2)
    assert load_text(tmp_path, dump_config(config)) == config
    assert load_config(None).training == Config().training


def test_config_is_frozen():
    with pytest.raises(ValueError):
        Config().training.steps = 5


def test_missing_and_broken_files(tmp_path):
    assert "did you mean debug.toml?" in problems_of(load_config, "debugg.toml")
    (tmp_path / "bom.toml").write_text("\ufeff[training]\nsteps = 7", encoding="utf-8")
    assert load_config(str(tmp_path / "bom.toml")).training.steps == 7
    (tmp_path / "broken.toml").write_text("[training\nsteps = 1")
    assert "broken.toml: not valid TOML" in problems_of(load_config, str(tmp_path / "broken.toml"))


def test_help_lists_every_key_with_its_meaning():
    text = key_help()
    for key, schema in key_schemas().items():
        assert f"--{key}=" in text and schema["description"] in text


def test_published_schema_is_current():
    schema = json.loads((CONFIG_DIR / "schema.json").read_text())
    assert schema == Config.model_json_schema(), "run: python -m trainer schema > train_configs/schema.json"
    page = (CONFIG_DIR.parent / "docs/config.md").read_text()
    assert page == key_page() + "\n", "run: python -m trainer schema --markdown > docs/config.md"


def rules(world_size: int = 1, **keys) -> str:
    return problems_of(resolve_config, overridden(**keys), world_size)


def test_b56_heads_not_divisible_by_tp():
    message = rules(4, parallel__tp=4, model__n_kv_heads=2, model__n_heads=8)
    assert "parallel.tp = 4 does not divide n_kv_heads = 2 of the model: use 1 or 2" in message
    message = rules(3, parallel__tp=3, model__n_kv_heads=4, model__n_heads=4)
    assert "parallel.tp = 3 does not divide n_heads = 4" in message and "n_kv_heads" in message


def test_b58_sequence_not_divisible_by_tp():
    message = rules(2, parallel__tp=2, training__seq_len=127)
    assert "training.seq_len = 127 is not a multiple of parallel.tp = 2" in message and "use 126 or 128" in message
    resolve_config(overridden(parallel__tp=2, training__seq_len=127, parallel__sequence_parallel="false"), 2)


def test_b59_more_stages_than_layers():
    message = rules(4, parallel__pp=4, model__n_layers=3)
    assert "parallel.pp = 4" in message and "n_layers = 3" in message
    message = rules(2, parallel__pp=2, parallel__schedule="Interleaved1F1B", parallel__virtual_stages=4)
    assert "makes 8 stages" in message and "n_layers = 6" in message


def test_b62_global_batch_not_divisible():
    message = rules(2, training__global_batch_size=10, training__micro_batch_size=4)
    assert "training.global_batch_size = 10" in message and "micro_batch_size = 4" in message and "dp = 2" in message
    assert "use 8 or 16" in message
    assert "use 8" in rules(2, training__global_batch_size=4, training__micro_batch_size=4)


MIXED = dict(data__sources__a__path="a.txt", data__sources__b__path="b.txt")


@pytest.mark.parametrize(
    "world_size, keys, expected",
    [
        (3, dict(parallel__tp=2), "but there are 3"),
        (4, dict(parallel__tp=2, parallel__dp_shard=4), "needs 8 processes, but there are 4: start with --nproc 8"),
        (2, dict(parallel__cp=2), "parallel.cp = 2"),
        (1, dict(parallel__balance="[6]"), "parallel.balance = [6] needs parallel.pp above 1"),
        (4, dict(parallel__tp=4, model__vocab_size=9), "leaves a rank without a row of vocab_size = 9"),
        (1, dict(parallel__virtual_stages=2), "needs parallel.pp above 1"),
        (2, dict(parallel__pp=2, parallel__virtual_stages=2), "1F1B takes exactly 1"),
        (2, dict(parallel__pp=2, parallel__schedule="ZBVZeroBubble", parallel__virtual_stages=3), "takes exactly 2"),
        (2, dict(parallel__pp=2, parallel__schedule="DualPipeV", compile__enabled="true"), "compile.enabled = true"),
        (2, dict(parallel__pp=2, parallel__schedule="zbvzerobubble", activation_checkpoint__mode="selective"), '"selective"'),
        (2, dict(parallel__pp=2, parallel__schedule="DualPipeV", parallel__reshard_after_forward="always"), "wrong gradients"),
        (2, dict(parallel__pp=2, parallel__balance="[1, 4]"), "add up to n_layers = 6, for example [3, 3]"),
        (8, dict(parallel__tp=2, model__vocab_size=321), "use model.vocab_size = 322, or dp_shard of at most 2"),
        (1, dict(model__size="9T"), 'model.size = "9T"'),
        (1, dict(model__dim=100), "dim = 100 is not a multiple of n_heads = 8"),
        (1, dict(lr_schedule__total_steps=50), "lr_schedule.total_steps = 50 is below training.steps = 100"),
        (1, dict(lr_schedule__decay_steps=5), 'only for decay = "wsd"'),
        (1, dict(lr_schedule__decay="wsd", lr_schedule__decay_steps=95), "above the 100 steps"),
        (1, dict(compile__mode="reduce-overhead", compile__backend="aot_eager"), 'use compile.backend = "inductor"'),
        (1, dict(checkpoint__enabled="false", checkpoint__export_dir="x"), "checkpoint.export_dir is set, but"),
        (1, dict(data__path="x.txt", data__source="bundled"), 'is not read with data.source = "bundled"'),
        (1, dict(data__path="x.txt", data__sources__a__path="a.txt"), "data.sources is instead of data.path"),
        (1, dict(data__curriculum="[{step = 2, weights = {a = 1}}]"), "and there are none"),
        (1, dict(data__sources__a__path="a.txt", data__sources__a__weight=0), "one must be above 0"),
        (1, MIXED | dict(data__curriculum="[{step = 2, weights = {c = 1}}]"), 'no source "c"; data.sources has a, b'),
        (1, MIXED | dict(data__curriculum="[{step = 5, weights = {}}, {step = 5, weights = {}}]"), "step 5 comes after step 5"),
        (1, MIXED | dict(data__curriculum="[{step = 2, weights = {a = 0.12345678}}]"), "from step 2 on the weights are"),
        (1, dict(data__source="text"), "needs data.path"),
    ],
)  # fmt: skip
def test_rules_that_tie_keys_together(world_size, keys, expected):
    assert expected in rules(world_size, **keys)


def test_rules_are_reported_together():
    message = rules(27, parallel__tp=3, parallel__pp=9, training__global_batch_size=10)
    assert message.count("error:") >= 4


def test_a_good_layout_resolves():
    config = overridden(parallel__tp=2, parallel__pp=2, parallel__dp_shard=2)
    resolved = resolve_config(config, 8)
    assert resolved.layers_per_stage == (3, 3) and resolved.n_microbatches == 4 and resolved.tokens_per_step == 2048


def test_the_default_output_folder_tells_layouts_apart():
    assert load_config("debug.toml").job.output_dir == "outputs/debug"
    layout = [Override("parallel.tp", "2"), Override("parallel.balance", "[1, 2]"), Override("training.steps", "5")]
    assert load_config("debug", layout).job.output_dir == "outputs/debug-tp2-balance1,2"
    assert load_config("debug", [*layout, Override("job.output_dir", "here")]).job.output_dir == "here"


def test_a_config_can_be_a_key():
    """Of a cache: nothing in it changes once it is read."""
    configs = [
        load_config(None, [Override("validation.sets", text)]) for text in ('{a = "x.txt"}', '{a = "y.txt"}', "{}")
    ]
    assert len(set(configs)) == 3 and configs[2] == load_config(None)
    assert load_config(None, [Override("validation.sets.a", "x.txt")]) in configs


@pytest.mark.parametrize(
    "keys, expected",
    [
        (dict(data__sources__a__wait=3), "unknown key data.sources.a.wait; did you mean weight?"),
        (dict(data__sources__a__weight="x"), 'data.sources.a.weight = "x"'),
        (dict(data__sources__a__weight=2), "data.sources.a.path is missing"),
        (dict(data__sources__a="x.txt"), "data.sources = {...}"),
        (dict(data__curriculum="[{weights = {a = 1}}]"), "data.curriculum.0.step is missing"),
        (dict(data__curriculum="3"), "data.curriculum = 3"),
    ],
)
def test_faults_in_tables_below_a_section_are_named(keys, expected):
    with pytest.raises(UserError) as caught:
        overridden(**keys)
    assert expected in caught.value.message(), caught.value.message()
