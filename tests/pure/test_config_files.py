"""Files based on others, the environment, where each value came from, the schema, and the configurations that come with the package."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from jaxkv.cli.main import main
from jaxkv.config import load_config
from jaxkv.config.fields import all_fields
from jaxkv.config.load import resolve_config
from jaxkv.config.show import as_yaml, schema, show
from jaxkv.errors import ConfigError
from jaxkv.models import FAMILIES

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def failing(source, **options):
    with pytest.raises(ConfigError) as error:
        resolve_config(source, **options)
    return str(error.value)


def test_a_file_takes_from_its_base_what_it_does_not_say_itself(folder):
    write(folder / "far" / "first.yaml", "model: {path: a, max_len: 100}\npool: {tokens: 640, page_size: 8}\n")
    write(folder / "far" / "second.yaml", "base: first.yaml\npool: {tokens: 1280}\nscheduler: {rows: 3}\n")
    write(folder / "c.yaml", "base: far/second.yaml\nscheduler: {victim: largest}\n")
    found = resolve_config("c.yaml", environ={})
    assert (found.config.model.max_len, found.config.pool.page_size, found.config.pool.tokens) == (100, 8, 1280)
    assert (found.config.scheduler.rows, found.config.scheduler.victim) == (3, "largest")
    origins = {name: origin for name, origin in found.origins.items() if origin != "default"}
    assert origins == {
        "model.path": "far/first.yaml", "model.max_len": "far/first.yaml", "pool.page_size": "far/first.yaml",
        "pool.tokens": "far/second.yaml", "scheduler.rows": "far/second.yaml", "scheduler.victim": "c.yaml",
    }  # fmt: skip


def test_a_list_or_a_grid_is_replaced_whole(folder):
    write(folder / "a.yaml", "model: {path: a}\nsweep: {grid: {scheduler.rows: [2, 4], pool.tokens: [640, 1280]}}\n")
    write(folder / "b.yaml", "base: a.yaml\nsweep: {grid: {scheduler.victim: [largest]}}\n")
    assert load_config("b.yaml").sweep.grid == {"scheduler.victim": ("largest",)}


def test_files_based_on_each_other_are_refused_with_the_whole_chain(folder):
    write(folder / "a.yaml", "base: sub/b.yaml\n")
    write(folder / "sub" / "b.yaml", "base: ../c.yaml\n")
    write(folder / "c.yaml", "base: a.yaml\n")
    assert failing("a.yaml") == (
        "base: the files are based on each other: a.yaml -> sub/b.yaml -> sub/../c.yaml -> sub/../a.yaml; take one of these lines out"
    )
    write(folder / "own.yaml", "base: own.yaml\n")
    assert failing("own.yaml") == "base: the files are based on each other: own.yaml -> own.yaml; take one of these lines out"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: [a.yaml]", "base: got ['a.yaml'], allowed: the name of another configuration, such as other.yaml, in c.yaml"),
        ("base: ''", "base: got '', allowed: the name of another configuration, such as other.yaml, in c.yaml"),
        ("base: gone.yaml", "cannot read the configuration gone.yaml: No such file or directory"),
        ("base: a.yaml\npool: {tokens: 0}", "pool.tokens: got 0, allowed: integer >= 1 | null in c.yaml"),
        ("base: wrong.yaml", "scheduler.rows: got 0, allowed: integer >= 1 in wrong.yaml"),
        ("base: listed.yaml", "pool must hold fields such as `tokens: VALUE`, got [1] in listed.yaml"),
    ],
)
def test_what_is_wrong_is_told_with_the_file_that_says_it(folder, text, message):
    write(folder / "a.yaml", "model: {path: a}\n")
    write(folder / "wrong.yaml", "base: a.yaml\nscheduler: {rows: 0}\n")
    write(folder / "listed.yaml", "base: a.yaml\npool: [1]\n")
    write(folder / "c.yaml", text)
    assert failing("c.yaml") == message


def test_the_environment_wins_over_files_and_the_command_line_over_the_environment(folder):
    write(folder / "c.yaml", "model: {path: a}\npool: {tokens: 640}\nscheduler: {rows: 2}\n")
    environ = {"JAXKV_POOL__TOKENS": "1280", "JAXKV_SCHEDULER__ROWS": "3", "JAXKV_REQUEST__STOP_TOKEN_IDS": "[1, 2]", "JAXKV_CACHE": "x"}
    found = resolve_config("c.yaml", ["--scheduler.rows", "4"], environ)
    assert (found.config.pool.tokens, found.config.scheduler.rows, found.config.request.stop_token_ids) == (1280, 4, (1, 2))
    assert (found.origins["pool.tokens"], found.origins["scheduler.rows"]) == ("JAXKV_POOL__TOKENS", "command line")


def test_the_environment_of_the_process_is_read_for_files_and_never_for_dicts(folder, monkeypatch):
    write(folder / "c.yaml", "model: {path: a}\n")
    monkeypatch.setenv("JAXKV_POOL__TOKENS", "1280")
    assert load_config("c.yaml").pool.tokens == 1280
    assert load_config({"model": {"path": "a"}}).pool.tokens is None


def test_a_wrong_variable_is_named(folder):
    write(folder / "c.yaml", "model: {path: a}\n")
    assert failing("c.yaml", environ={"JAXKV_POOL__TOKNS": "1"}) == (
        "unknown field 'pool.tokns', nearest valid name: pool.tokens in the environment variable JAXKV_POOL__TOKNS"
    )
    assert failing("c.yaml", environ={"JAXKV_POOL__TOKENS": "many"}) == (
        "pool.tokens: got 'many', allowed: integer >= 1 | null in JAXKV_POOL__TOKENS"
    )


def test_what_is_shown_is_a_file_that_loads_to_the_same(folder):
    words = ["--request.stop", '["a: b", "#"]', "--request.logit-bias", "{5: -1.5}", "--sweep.grid", "{scheduler.rows: [2, null]}"]
    write(folder / "c.yaml", "model: {path: 'a # b'}\npool: {tokens: 640}\n")
    found = resolve_config("c.yaml", [*words, "--transfer.timeout-s", "1e-9"], {})
    write(folder / "again.yaml", show(found))
    assert load_config("again.yaml") == found.config
    assert "  tokens: 640                    # c.yaml\n" in show(found)
    assert "  rows: 8                        # default\n" in show(found)
    assert show(found, only_set=True).splitlines()[:5] == [
        "model:", "  path: 'a # b'                  # c.yaml", "pool:", "  tokens: 640                    # c.yaml", "transfer:",
    ]  # fmt: skip


def test_values_of_one_line_keep_their_order():
    assert as_yaml({"b": [1, 2], "a": [None, "x y"]}) == "{b: [1, 2], a: [null, x y]}"
    assert as_yaml("x") == "x" and as_yaml(None) == "null" and as_yaml(1e-9) == "1.0e-09"


def test_the_commands_print_and_tell_by_their_exit_code(folder, capsys):
    write(folder / "c.yaml", "model: {path: a}\n")
    write(folder / "bad.yaml", "model: {path: a}\npool: {tokns: 1}\n")
    assert main(["config", "show", "c.yaml", "--only-set", "--pool.tokens", "640"]) == 0
    assert capsys.readouterr().out == (
        "model:\n  path: a                        # c.yaml\npool:\n  tokens: 640                    # command line\n"
    )
    assert main(["config", "check", "c.yaml"]) == 0
    assert capsys.readouterr().out == "c.yaml: good\n"
    assert main(["config", "check", "bad.yaml", "c.yaml"]) == 2
    told = capsys.readouterr()
    assert told.out == "c.yaml: good\n"
    assert told.err == "jaxkv: error: bad.yaml: unknown field 'pool.tokns', nearest valid name: pool.tokens in bad.yaml\n"
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sweep: {grid: {pool.tokens: [64, 0]}}", "pool.tokens: got 0, allowed: integer >= 1 | null"),
        ("sweep: {grid: {pool.tokns: [64]}}", "unknown field 'pool.tokns', nearest valid name: pool.tokens"),
        ("workload: {kind: measured, trace: none.jsonl}", "cannot read the trace none.jsonl: No such file or directory"),
    ],
)
def test_a_check_looks_at_every_case_and_at_the_files_of_the_load(folder, capsys, text, message):
    write(folder / "c.yaml", f"model: {{path: a}}\n{text}\n")
    assert main(["config", "check", "c.yaml"]) == 2
    assert capsys.readouterr().err == f"jaxkv: error: c.yaml: {message}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["config", "shwo"], "jaxkv: error: unknown command 'config shwo', did you mean 'show'?\n"),
        (["config", "print"], "jaxkv: error: unknown command 'config print', there are show, check, schema\n"),
        (["config", "check"], "jaxkv: error: config check needs a configuration, such as configs/quickstart.yaml\n"),
    ],
)
def test_a_wrong_word_is_one_line(capsys, words, message):
    assert main(words) == 2
    assert capsys.readouterr().err == message


def test_the_schema_knows_every_field_and_requires_none():
    found = schema()
    assert list(found["properties"]) == ["base", *dict.fromkeys(name.partition(".")[0] for name in all_fields())]
    for name, field in all_fields().items():
        section, _, key = name.partition(".")
        part = found["$defs"][found["properties"][section]["$ref"].rpartition("/")[2]]
        assert part["properties"][key]["description"] == field.description
        assert "required" not in part and part["additionalProperties"] is False
    stop = found["$defs"]["RequestSection"]["properties"]["stop"]["anyOf"]
    several = {"type": "array", "items": {"type": "string"}, "maxItems": 16}
    assert stop == [{"type": "string"}, several, {"type": "null"}]


def test_the_schema_allows_what_the_shipped_configurations_say():
    for path in CONFIGS.rglob("*.yaml"):
        jsonschema.validate(yaml.safe_load(path.read_text()), schema())


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.relative_to(CONFIGS).as_posix())
def test_every_configuration_that_comes_with_the_package_is_good(path, capsys):
    assert main(["config", "check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: good\n"


def test_there_is_a_configuration_for_each_purpose_and_for_each_family():
    names = {path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml")}
    assert {"quickstart.yaml", "pressure.yaml", "policies.yaml", "server.yaml", "gpu.yaml", "tpu.yaml"} <= names
    families = {name.removeprefix("models/").removesuffix(".yaml") for name in names if name.startswith("models/")}
    assert families == set(FAMILIES)
