"""Calibration on the tiny engine: the costs are there, are what a step takes, and leave the engine as it was."""

import json
from pathlib import Path

import pytest
import yaml

from jaxkv.calibrate import calibrate, fit
from jaxkv.cli.main import main
from jaxkv.request import SamplingParams
from jaxkv.simulate.costs import Costs, read_costs
from tests.cpu import tiny


def test_a_fit_finds_the_factors_it_was_made_from():
    features = [[1.0, 10.0, 40.0], [1.0, 100.0, 100.0], [1.0, 100.0, 400.0], [1.0, 5.0, 5.0]]
    times = [2.0 + 0.5 * longest + 0.25 * total for _, longest, total in features]
    found, error = fit(features, times)
    assert found == pytest.approx([2.0, 0.5, 0.25]) and error < 1e-9


def test_a_factor_below_zero_is_left_out():
    found, error = fit([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], [3.0, 2.0, 1.0])
    assert found[1] == 0.0 and 1.0 < found[0] < 2.0 and error > 0.1


def test_costs_are_measured_and_the_engine_answers_and_parks_as_before():
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with tiny.engine(pool__tokens=256) as made:
        before = tiny.run(made, [tiny.prompt(12)], params)
        found = calibrate(made, repeats=2)
        assert [tiny.content(one) for one in tiny.run(made, [tiny.prompt(12)], params)] == [tiny.content(one) for one in before]
        handle = made.submit(tiny.prompt(12), params)
        tiny.step_to(made, handle, 3)
        assert made.scheduler.park(handle.seq_id) == ""
        assert tiny.content(handle.result()) == tiny.content(before[0])
        tiny.settle(made)
        assert made.scheduler.counters.num_parks_copied == 1
        assert made.parts.transfer.stored == {}  # host memory that nobody needs is given back, as before
    costs = found.costs
    assert costs.decode_s + costs.decode_longest_s + costs.decode_token_s > 0  # a tiny step is mostly noise
    assert costs.token_bytes == made.parts.layout.page_bytes // 4
    assert costs.step_s < 1 and costs.copy_s < 1


def test_the_command_writes_a_file_that_the_simulator_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(yaml.safe_dump(tiny.SECTIONS))
    assert main(["calibrate", "c.yaml", "--output", "costs.json", "--repeats", "1"]) == 0
    assert "calibrate: decode step " in capsys.readouterr().err
    assert Costs(**read_costs(Path("costs.json"))).token_bytes == 768
    written = json.loads(Path("costs.json").read_text())
    assert (written["rows"], written["prefill_chunk"], written["chunk_pages"]) == (4, 8, 4)
    words = ["--workload.prompt_len_min=4", "--workload.prompt_len_max=8", "--workload.answer_len_min=8", "--workload.answer_len_max=20"]
    assert main(["simulate", "c.yaml", "--simulate.costs", "costs.json", "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out)["num_finished"] == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "c.json", "--repeats", "0"], "--repeats: got 0, allowed: 1 or more"),
        (["--output", "no/c.json"], "--output no/c.json: there is no folder no"),
    ],
)
def test_what_cannot_be_measured_is_told_before_a_model_is_loaded(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("model: {path: none}\n")
    assert main(["calibrate", "c.yaml", *words]) == 2
    assert capsys.readouterr().err == f"jaxkv: error: {message}\n"
