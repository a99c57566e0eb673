"""Reading, overriding and writing a configuration."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from jaxkv.config import Config, load_config, split_overrides
from jaxkv.config.fields import all_fields
from jaxkv.errors import ConfigError

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SMALLEST = {"model": {"path": "smollm2"}}


def test_a_path_is_all_a_configuration_needs():
    config = load_config(SMALLEST)
    assert (config.scheduler.rows, config.pool.page_size, config.scheduler.prefill_chunk) == (8, 16, 64)
    assert (config.scheduler.margin_steps, config.scheduler.starve_after, config.scheduler.host_budget_mib) == (8, 3, "auto")
    assert (config.transfer.mode, config.transfer.staging_mib, config.transfer.timeout_s) == ("auto", 64, 60.0)
    assert config.debug.planner is True and config.pool.tokens is None and config.request.temperature is None


def test_the_quickstart_writes_out_every_field_with_its_default():
    written = yaml.safe_load(QUICKSTART.read_text())
    assert {f"{section}.{name}" for section, fields in written.items() for name in fields} == set(all_fields())
    assert load_config(QUICKSTART) == load_config(SMALLEST, {"pool.tokens": written["pool"]["tokens"]})


def test_a_configuration_cannot_be_changed_once_made():
    config = load_config(SMALLEST)
    with pytest.raises(ValidationError):
        config.scheduler.rows = 3


def test_an_override_wins_over_the_file_and_leaves_the_callers_dict_alone():
    given = {"model": {"path": "smollm2"}, "pool": {"tokens": 640}}
    assert load_config(given, {"pool.tokens": 1280}).pool.tokens == 1280
    assert given["pool"] == {"tokens": 640}


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--pool.tokens", "640"], "pool.tokens", 640),
        (["--pool.tokens=640"], "pool.tokens", 640),
        (["--pool.tokens", "null"], "pool.tokens", None),
        (["--scheduler.prefill-chunk", "32"], "scheduler.prefill_chunk", 32),
        (["--scheduler.prefill_chunk", "32"], "scheduler.prefill_chunk", 32),
        (["--scheduler.host-budget-mib", "auto"], "scheduler.host_budget_mib", "auto"),
        (["--scheduler.host-budget-mib", "null"], "scheduler.host_budget_mib", None),
        (["--scheduler.host-budget-mib", "0"], "scheduler.host_budget_mib", 0),
        (["--debug.planner", "false"], "debug.planner", False),
        (["--debug.planner=true"], "debug.planner", True),
        (["--transfer.timeout-s", "5"], "transfer.timeout_s", 5.0),
        (["--request.temperature", "1e-1"], "request.temperature", 0.1),
        (["--request.presence-penalty", "-1"], "request.presence_penalty", -1.0),
        (["--request.stop", "END"], "request.stop", ("END",)),
        (["--request.stop", '["a", "b: c"]'], "request.stop", ("a", "b: c")),
        (["--request.stop_token_ids", "[1, 2]"], "request.stop_token_ids", (1, 2)),
        (["--request.logit-bias", "{5: -100}"], "request.logit_bias", {"5": -100.0}),
        (["--request.logprobs", "true"], "request.logprobs", True),
        (["--request.logprobs", "3"], "request.logprobs", 3),
        (["--model.path", "123"], "model.path", "123"),
        (["--model.path", "a=b: c"], "model.path", "a=b: c"),
        (["--run.cache-dir", "null"], "run.cache_dir", None),
        (["--pool.tokens", "640", "--pool.tokens", "1280"], "pool.tokens", 1280),
    ],
)
def test_an_override_on_the_command_line_is_read_as_its_field_means_it(words, field, value):
    section, name = field.split(".")
    got = getattr(getattr(load_config(SMALLEST, words), section), name)
    assert got == value and type(got) is type(value)


def test_overrides_are_taken_out_wherever_they_stand_and_the_rest_keeps_its_order():
    words = ["a.yaml", "--pool.tokens", "640", "--input", "-", "--debug.planner=false", "--output", "o.jsonl"]
    values, rest = split_overrides(words)
    assert values == {"pool.tokens": 640, "debug.planner": False}
    assert rest == ["a.yaml", "--input", "-", "--output", "o.jsonl"]


@given(
    rows=st.integers(1, 64),
    page=st.integers(1, 256),
    tokens=st.none() | st.integers(512, 10**6),
    stop=st.none() | st.lists(st.text(), max_size=4),
    bias=st.none() | st.dictionaries(st.integers(0, 999), st.floats(-100, 100), max_size=3),
    budget=st.none() | st.just("auto") | st.integers(0, 10**5),
)
def test_what_is_written_loads_to_the_same_configuration(rows, page, tokens, stop, bias, budget):
    values = {"scheduler.rows": rows, "pool.page_size": page, "pool.tokens": tokens, "request.stop": stop}
    config = load_config(SMALLEST, values | {"request.logit_bias": bias, "scheduler.host_budget_mib": budget})
    assert load_config(yaml.safe_load(config.to_yaml())) == config
    assert load_config(config.to_dict()) == config


def test_a_number_with_an_exponent_is_a_number_in_a_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: x}\nrequest: {temperature: 1e-1}\nrun:\n")
    assert load_config(file).request.temperature == 0.1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scheduler.rows", "0"], "scheduler.rows: got 0, allowed: integer >= 1"),
        (["--scheduler.rows", "1.5"], "scheduler.rows: got 1.5, allowed: integer >= 1"),
        (["--pool.tokens", "true"], "pool.tokens: got true, allowed: integer >= 1 | null"),
        (["--pool.memory-fraction", "1.5"], "pool.memory_fraction: got 1.5, allowed: number > 0 and <= 1"),
        (["--scheduler.victim", "big"], "scheduler.victim: got 'big', allowed: smallest | largest | youngest | oldest | priority"),
        (["--scheduler.resume", "tail"], "scheduler.resume: got 'tail', allowed: head | pass"),
        (["--scheduler.admission", "eager"], "scheduler.admission: got 'eager', allowed: optimistic | reserve"),
        (["--scheduler.rotate", "all"], "scheduler.rotate: got 'all', allowed: shifted | any | none"),
        (["--scheduler.max-bypass", "-1"], "scheduler.max_bypass: got -1, allowed: integer >= 0 | null"),
        (["--scheduler.rotate-after-s", "-1"], "scheduler.rotate_after_s: got -1, allowed: number >= 0"),
        (["--debug.planner", "maybe"], "debug.planner: got 'maybe', allowed: true | false"),
        (["--scheduler.host-budget-mib", "-1"], "scheduler.host_budget_mib: got -1, allowed: integer >= 0 | auto | null"),
        (["--request.stop-token-ids", "[a]"], "request.stop_token_ids: got ['a'], allowed: list of integer >= 0 | null"),
        (["--scheduler.row", "1"], "unknown field 'scheduler.row', nearest valid name: scheduler.rows"),
        (["--scheduler.page-size", "1"], "unknown field 'scheduler.page_size', nearest valid name: pool.page_size"),
        (["--modle.path", "x"], "unknown field 'modle.path', nearest valid name: model.path"),
        (
            ["--zzz.qqq", "x"],
            "unknown field 'zzz.qqq', valid sections: model, pool, scheduler, transfer, speculate, mesh, debug, request, log, run, "
            "server, workload, simulate, sweep",
        ),
        (["--pool.tokens"], "--pool.tokens needs a value: integer >= 1 | null"),
        (["--pool.tokens", "--debug.planner", "true"], "--pool.tokens needs a value: integer >= 1 | null"),
        (["--rows", "3"], "'--rows' is no override: write --section.field VALUE"),
        (
            ["--pool.tokens", "63"],
            "the pool holds 48 tokens in whole pages of 16, less than one prompt chunk of 64: "
            "raise pool.tokens or lower scheduler.prefill_chunk",
        ),
        (
            ["--speculate.kind", "draft"],
            "speculate.draft_path: got null with speculate.kind draft; give a small model with the same tokenizer",
        ),
    ],
)
def test_a_wrong_override_is_one_line_with_got_and_allowed(words, message):
    with pytest.raises(ConfigError) as error:
        load_config(SMALLEST, words)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "model.path is missing in {}: a model folder, a GGUF file, or a known name such as smollm2"),
        ("model:", "model.path is missing in {}: a model folder, a GGUF file, or a known name such as smollm2"),
        ("[1]", "{} must hold sections such as `model:` and `pool:`, got a list"),
        ("model: smollm2", "model must hold fields such as `path: VALUE`, got 'smollm2' in {}"),
        ("model: {path: x}\npol: {}", "unknown section 'pol', nearest valid name: pool in {}"),
        ("model: {path: x}\nrows: 3", "unknown section 'rows', nearest valid name: scheduler.rows in {}"),
        ("model: {path: x}\npool: {pagesize: 1}", "unknown field 'pool.pagesize', nearest valid name: pool.page_size in {}"),
        ("model: {path: x}\npool: {page_size: '16'}", "pool.page_size: got '16', allowed: integer >= 1 in {}"),
        (
            "model: {path: x}\nscheduler: {rows: 0, victim: me}",
            "scheduler.rows: got 0, allowed: integer >= 1 in {}; "
            "scheduler.victim: got 'me', allowed: smallest | largest | youngest | oldest | priority in {}",
        ),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(tmp_path, text, message):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert str(error.value) == message.replace("{}", str(file))


def test_a_key_written_twice_is_refused(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: x}\npool: {tokens: 640}\npool: {page_size: 8}\n")
    with pytest.raises(ConfigError, match=r"c.yaml is not valid YAML: line 3: the key 'pool' stands twice$"):
        load_config(file)


def test_a_file_that_is_not_there_or_no_yaml_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*none.yaml: No such file or directory"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"bad.yaml is not valid YAML") as error:
        load_config(tmp_path / "bad.yaml")
    assert "\n" not in str(error.value)


def test_an_override_by_name_in_python_takes_dashes_too():
    assert load_config(SMALLEST, {"scheduler.prefill-chunk": 32}).scheduler.prefill_chunk == 32
    with pytest.raises(ConfigError, match=r"scheduler.rows: got '3', allowed: integer >= 1"):
        load_config(SMALLEST, {"scheduler.rows": "3"})


def test_every_field_says_what_it_means():
    for field in all_fields().values():
        assert len(field.description) > 5, field.name
        assert "<class" not in field.allowed and "typing" not in field.allowed, field
    assert set(all_fields()) == {f"{s}.{n}" for s, part in load_config(SMALLEST).to_dict().items() for n in part}


def test_a_json_schema_can_be_made():
    assert Config.model_json_schema()["properties"].keys() == Config.model_fields.keys()
