"""Sweeps on the simulator: which runs there are, their folders, going on, failures, results in files, and what is refused."""

import csv
import json
from pathlib import Path

import pytest

from jaxkv.cli.main import main
from jaxkv.config import load_config
from jaxkv.errors import ConfigError
from jaxkv.sweep import loop
from jaxkv.sweep.folder import SweepFolder, read_sweep
from jaxkv.sweep.matrix import list_runs
from jaxkv.sweep.results import read_results
from jaxkv.sweep.simulated import run_simulated

SMALL = """
model: {path: x}
pool: {tokens: 512}
workload: {num_requests: 4, prompt_len_min: 8, prompt_len_max: 64, answer_len_min: 20, answer_len_max: 150}
simulate: {processes: 1}
sweep:
  grid: {scheduler.victim: [smallest, largest]}
  seeds: 2
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(SMALL)
    return tmp_path


def runs(simulated=True, **fields):
    import yaml

    return list_runs(load_config(yaml.safe_load(SMALL), {name.replace("__", "."): value for name, value in fields.items()}), simulated)


def sweep(*words):
    return main(["sweep", "c.yaml", "--output", "out", "--simulate", *words])


def manifests():
    return {path.parent.name: json.loads(path.read_text()) for path in Path("out/runs").glob("*/manifest.json")}


# Which runs


def test_cases_take_turns_and_every_round_begins_with_another():
    found = runs(sweep__repeats=2, sweep__grid={"scheduler.victim": ["smallest", "largest", "oldest"]})
    order = [(run.values["scheduler.victim"], run.seed, run.repeat) for run in found]
    assert order == [
        ("smallest", 0, 0), ("largest", 0, 0), ("oldest", 0, 0),
        ("largest", 1, 0), ("oldest", 1, 0), ("smallest", 1, 0),
        ("oldest", 0, 1), ("smallest", 0, 1), ("largest", 0, 1),
        ("smallest", 1, 1), ("largest", 1, 1), ("oldest", 1, 1),
    ]  # fmt: skip
    assert len({run.key for run in found}) == 12
    assert found[0].config.scheduler.victim == "smallest" and found[3].config.workload.seed == 1


def test_a_run_is_known_by_what_it_does_and_by_nothing_else(tmp_path):
    keys = [run.key for run in runs()]
    assert [run.key for run in runs(log__level="debug", server__port=1, simulate__processes=2)] == keys
    assert set(keys).isdisjoint(run.key for run in runs(pool__tokens=1024))
    assert set(keys).isdisjoint(run.key for run in runs(simulated=False))
    wider = runs(sweep__grid={"scheduler.victim": ["youngest", "smallest"]}, sweep__seeds=3)
    assert {run.key for run in wider if run.values["scheduler.victim"] == "smallest" and run.seed < 2} <= set(keys)
    prompts = tmp_path / "p.txt"
    prompts.write_text("one")
    before = [run.key for run in runs(workload__prompts=[str(prompts)])]
    prompts.write_text("two")
    assert set(before).isdisjoint(run.key for run in runs(workload__prompts=[str(prompts)]))


def test_folders_are_named_after_the_case():
    first, *_ = runs(sweep__grid={"pool.tokens": [512]}, sweep__zip={"scheduler.resume": ["pass"], "scheduler.max_bypass": [None]})
    assert first.folder == f"tokens-512-resume-pass-max_bypass-null-s0-r0-{first.key[:10]}".replace("_", "-")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sweep.grid", "{scheduler.victm: [a]}"], "unknown field 'scheduler.victm', nearest valid name: scheduler.victim"),
        (
            ["--sweep.grid", "{}"],
            "sweep: nothing is varied: give fields lists of values under sweep.grid or sweep.zip; for one run as it is, "
            "--sweep.grid '{workload.seed: [0]}'",
        ),
        (
            ["--sweep.grid", "{scheduler.victim: [smallest, largest, smallest]}"],
            "sweep: the case victim smallest stands twice; take one out, or ask for more sweep.repeats",
        ),
        (["--sweep.grid", "{scheduler.victim: []}"], "sweep.grid: scheduler.victim has no values; name some, or leave it out"),
        (
            ["--sweep.zip", "{scheduler.victim: [oldest]}"],
            "sweep: scheduler.victim stands in grid and in zip, so two axes would set it; take it out of one of them",
        ),
        (
            ["--sweep.grid", "{workload.seed: [1, 2]}"],
            "sweep.seeds: got 2, which sets workload.seed, as sweep.grid does; take one of them out",
        ),
        (["--pool.tokens", "null"], "pool.tokens: null takes a share of the device's memory, and a simulation has no device; set it"),
        (["--shard", "3/2"], "--shard: got '3/2', allowed: i/n with 1 <= i <= n, such as 2/3"),
        (
            ["--workload.prompts", "[q.csv]", "--workload.template", "{answer}"],
            "workload.template: q.csv, line 2 has no column 'answer'; it has question",
        ),
        (["--output", "c.yaml"], "--output c.yaml: is a file, a folder is needed"),
        (["--output", "full"], "--output full: is not empty and no sweep's folder, since it has no sweep.json; choose another"),
        (
            ["--output", "old"],
            "old was written by another version: its schema_version is 0, this one reads 1; "
            "choose another folder, or use the version that wrote it",
        ),
        (["--output", "live"], "--output live: holds engine runs, these are simulated; choose another folder"),
        (["--output", "torn"], "torn/sweep.json is not valid JSON: Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_what_cannot_be_swept_is_one_line_before_anything_runs(folder, capsys, monkeypatch, words, message):
    monkeypatch.setattr(loop, "run_simulated", None)
    Path("q.csv").write_text("question\nwhy?\n")
    for name, content in (("full/x", ""), ("old/sweep.json", '{"schema_version": 0}'), ("torn/sweep.json", "x")):
        Path(name).parent.mkdir()
        Path(name).write_text(content)
    Path("live").mkdir()
    Path("live/sweep.json").write_text('{"schema_version": 1, "kind": "engine"}')
    assert main(["sweep", "c.yaml", "--simulate", *words]) == 2
    assert capsys.readouterr() == ("", f"jaxkv: error: {message}\n")
    assert not Path("results").exists()


# What is left of them


def test_each_run_has_a_folder_with_all_that_is_known_of_it(folder, capsys):
    assert sweep() == 0
    out, err = capsys.readouterr()
    assert "means over 2 runs of each case" in out and "victim smallest" in out
    assert err.splitlines()[-1] == "sweep: 4 of 4 runs finished; out"
    assert read_sweep(Path("out"))["kind"] == "simulated"
    for path in Path("out/runs").iterdir():
        assert sorted(file.name for file in path.iterdir()) == [
            "config.yaml", "log.txt", "manifest.json", "outputs.jsonl", "summary.json", "timeline.json",
        ]  # fmt: skip
        manifest, config = json.loads((path / "manifest.json").read_text()), load_config(path / "config.yaml")
        assert (manifest["status"], manifest["schema_version"], manifest["kind"]) == ("finished", 1, "simulated")
        assert manifest["case"]["scheduler.victim"] == config.scheduler.victim and manifest["seed"] == config.workload.seed
        assert {"versions", "commit", "input_sha256", "xla_flags", "machine", "outputs_sha256", "wall_s"} <= set(manifest)
        lines = [json.loads(line) for line in (path / "outputs.jsonl").read_text().splitlines()]
        assert [line["custom_id"] for line in lines] == [f"request-{i:06d}" for i in range(4)]
        outcome, summary = run_simulated(config), json.loads((path / "summary.json").read_text())
        assert summary == {"schema_version": 1, **outcome.figures.to_dict()}
        assert manifest["outputs_sha256"] == outcome.outputs_sha256
        assert sum(len(line["pauses_s"]) for line in lines) == summary["num_parks"]


def test_the_same_command_again_does_nothing_and_more_seeds_only_the_new_ones(folder, capsys, monkeypatch):
    assert sweep() == 0
    before = manifests()
    monkeypatch.setattr(loop, "run_simulated", None)
    assert sweep() == 0
    assert "sweep: 4 of 4 runs are finished already" in capsys.readouterr().err
    monkeypatch.setattr(loop, "run_simulated", run_simulated)
    assert sweep("--sweep.seeds", "3") == 0
    assert {name: manifest for name, manifest in manifests().items() if name in before} == before
    assert len(manifests()) == 6 and len(read_results(Path("out"))) == 6


def test_a_failed_run_stops_nothing_is_shown_and_done_again(folder, capsys, monkeypatch):
    def fail(config):
        if config.scheduler.victim == "largest" and config.workload.seed == 0:
            raise ValueError("no luck")
        return run_simulated(config)

    monkeypatch.setattr(loop, "run_simulated", fail)
    assert sweep() == 3
    err = capsys.readouterr().err
    assert "sweep: victim largest, seed 0, repeat 0: failed: ValueError: no luck" in err
    assert err.endswith("sweep: 3 of 4 runs finished; 1 failed, the same command does them again; out\n")
    rows = read_results(Path("out"))
    assert [row["status"] for row in rows] == ["finished", "failed", "finished", "finished"] and rows[1]["error"] == "ValueError: no luck"
    monkeypatch.setattr(loop, "run_simulated", run_simulated)
    assert sweep() == 0
    assert [row["status"] for row in read_results(Path("out"))] == ["finished"] * 4


def test_an_interrupted_sweep_keeps_what_is_finished_and_goes_on(folder, capsys, monkeypatch):
    made = []

    def interrupt(config):
        made.append(config)
        if len(made) == 3:
            raise KeyboardInterrupt
        return run_simulated(config)

    monkeypatch.setattr(loop, "run_simulated", interrupt)
    assert sweep() == 130
    assert "sweep: 2 of 4 runs finished; 2 not made yet; out" in capsys.readouterr().err
    assert sorted(manifest["status"] for manifest in manifests().values()) == ["finished", "finished", "started"]
    assert sweep() == 0
    assert len(made) == 5 and len(read_results(Path("out"))) == 4


@pytest.mark.parametrize(
    ("file", "content"),
    [("summary.json", '{"x'), ("summary.json", None), ("outputs.jsonl", None), ("manifest.json", "[1]"), ("manifest.json", "{}")],
)
def test_a_finished_run_with_a_damaged_or_missing_file_is_made_again(folder, capsys, file, content):
    assert sweep() == 0
    before = Path("out/results.jsonl").read_text()
    damaged = sorted(Path("out/runs").iterdir())[0] / file
    damaged.unlink()
    if content is not None:
        damaged.write_text(content)
    capsys.readouterr()
    assert sweep() == 0
    assert "sweep: 3 of 4 runs are finished already\n" in capsys.readouterr().err
    assert Path("out/results.jsonl").read_text() == before


def test_parts_of_a_sweep_make_each_run_once_and_the_results_are_of_all(folder, monkeypatch):
    made = []
    monkeypatch.setattr(loop, "run_simulated", lambda config: made.append(config) or run_simulated(config))
    assert sweep("--shard", "1/3") == 0
    assert len(read_results(Path("out"))) == 2
    assert sweep("--shard", "2/3") == sweep("--shard", "3/3") == 0
    assert len(made) == 4 and len(read_results(Path("out"))) == 4


def test_two_sweeps_do_not_make_the_same_runs_at_once_and_two_parts_may(folder, capsys):
    assert sweep("--shard", "1/3") == 0
    capsys.readouterr()
    with SweepFolder(Path("out")).held("1-1"):
        assert sweep() == 2
        told = "another sweep makes these runs just now; wait for it, or choose another folder"
        assert capsys.readouterr().err == f"jaxkv: error: --output out: {told}\n"
        assert sweep("--shard", "2/3") == 0
    assert sweep() == 0 and len(read_results(Path("out"))) == 4


def test_several_processes_leave_the_same_results(folder):
    assert sweep() == 0
    assert main(["sweep", "c.yaml", "--simulate", "--output", "two", "--simulate.processes", "2"]) == 0
    drop = {"commit", "run"}
    one, two = ([{k: v for k, v in row.items() if k not in drop} for row in read_results(Path(name))] for name in ("out", "two"))
    assert one == two


def test_a_dry_run_shows_the_matrix_and_an_estimate_and_makes_nothing(folder, capsys):
    assert sweep("--dry-run") == 0
    out, err = capsys.readouterr()
    assert "4 runs" in out and "scheduler.victim" in out and "4 to make, about " in out and err == ""
    assert not Path("out").exists()
    assert sweep() == 0
    capsys.readouterr()
    assert sweep("--dry-run") == 0
    assert capsys.readouterr().out.endswith("nothing is missing\n")


def test_results_have_a_version_and_units_in_their_names_in_both_files(folder):
    assert sweep() == 0
    rows = read_results(Path("out"))
    flat = list(csv.DictReader(Path("out/results.csv").read_text().splitlines()))
    assert [row["scheduler.victim"] for row in flat] == [row["case"]["scheduler.victim"] for row in rows]
    assert {"schema_version", "seed", "repeat", "makespan_s", "tokens_per_s", "host_peak_bytes", "num_parks"} <= set(flat[0])
    assert [float(row["makespan_s"]) for row in flat] == [row["makespan_s"] for row in rows]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "out: cannot read results.jsonl: No such file or directory; `jaxkv sweep` writes it"),
        ("x\n", "out/results.jsonl, line 1: is not JSON: Expecting value: line 1 column 1 (char 0)"),
        ('{"schema_version": 7}\n', "out/results.jsonl, line 1: its schema_version is 7, this one reads 1"),
    ],
)
def test_results_that_cannot_be_read_are_one_line(folder, content, message):
    Path("out").mkdir()
    Path("out/sweep.json").write_text('{"schema_version": 1}')
    if content is not None:
        Path("out/results.jsonl").write_text(content)
    with pytest.raises(ConfigError) as error:
        read_results(Path("out"))
    assert str(error.value) == message
    with pytest.raises(ConfigError, match=r"^none is no sweep's folder: cannot read sweep.json: No such file or directory$"):
        read_results(Path("none"))
