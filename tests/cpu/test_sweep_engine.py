"""Sweeps on the tiny engine: the same bytes in every run of a load, whoever is parked, and what belongs to a run alone."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from jaxkv.cli.main import main
from jaxkv.config import load_config
from jaxkv.openai import BodyReader, Endpoint
from jaxkv.sweep import live
from jaxkv.sweep.live import LiveRunner
from jaxkv.sweep.results import read_results
from jaxkv.workload.bodies import make_calls
from tests.cpu import tiny

LOAD = {"num_requests": 5, "prompt_len_min": 4, "prompt_len_max": 12, "answer_len_min": 20, "answer_len_max": 40}
POOL = {"pool": {"tokens": 64, "page_size": 4}}
SWEEP = {"grid": {"scheduler.victim": ["smallest", "largest"]}, "repeats": 2}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scheduler = {**tiny.SECTIONS["scheduler"], "rotate": "none"}
    Path("c.yaml").write_text(yaml.safe_dump({**tiny.SECTIONS, **POOL, "scheduler": scheduler, "workload": LOAD, "sweep": SWEEP}))
    return tmp_path


def outputs(name="out"):
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(Path(name, "runs").glob("*/outputs.jsonl"))]


def test_every_run_of_a_load_gives_the_bytes_of_each_request_alone(folder, capsys):
    words = [
        "--workload.choices",
        "[1, 2]",
        "--workload.cancels",
        "0.3",
        "--workload.max-tokens",
        "60",
        "--workload.shared-prefix-len",
        "6",
    ]
    assert main(["sweep", "c.yaml", "--output", "out", *words]) == 0
    rows = read_results(Path("out"))
    assert len(rows) == 4 and len({row["outputs_sha256"] for row in rows}) == len({row["system_fingerprint"] for row in rows}) == 1
    assert all(row["num_parks"] > 0 and row["num_compiles_after_warmup"] == 0 and row["num_failed"] == 0 for row in rows)
    capsys.readouterr()
    assert main(["compare", "out:scheduler.victim=smallest", "out:scheduler.victim=largest"]) == 0
    assert "outputs are the same bytes in 2 of 2 pairs" in capsys.readouterr().out
    config = load_config("c.yaml", words)
    with tiny.engine() as engine:
        reader = BodyReader(None, tiny.VOCAB, {})
        calls = {call.custom_id: call for call in make_calls(config, tiny.VOCAB)}
        for line in outputs()[0]:
            call = calls[line["custom_id"]]
            body = reader.read(Endpoint(call.url), call.body, 0)
            alone = engine.submit_group(body.prompts[0], body.params).choices[line["choice"]].result().token_ids
            tiny.settle(engine)
            assert line["token_ids"] == alone[: call.request.ends_after] and line["num_tokens"] == len(line["token_ids"])
            assert line["ended"] == ("cancelled" if call.request.is_cancelled else "finished")


def test_times_of_arrivals_are_kept_and_figures_begin_anew_with_each_run(folder):
    config = load_config("c.yaml", {"workload.arrivals": "staggered", "workload.every_s": 0.05, "sweep.grid": {}, "sweep.repeats": 1})
    with LiveRunner() as runner:
        first, second = runner.run(config), runner.run(load_config(config.to_dict(), {"scheduler.victim": "largest"}))
    for outcome in (first, second):
        arrivals = [line["arrival_s"] for line in outcome.lines]
        assert all(arrival >= 0.05 * i for i, arrival in enumerate(arrivals)) and outcome.figures.makespan_s >= 0.2
        assert outcome.figures.num_finished == 5 and outcome.more["num_decode_steps"] < 200
        assert outcome.timeline.times[0] >= 0 and max(sum(held.values()) for held in outcome.timeline.pages) <= 16
        assert len(outcome.figures.to_dict()) == 22
    assert first.outputs_sha256 == second.outputs_sha256


def test_an_engine_is_made_once_while_only_policies_and_loads_change(folder, monkeypatch):
    made, closed = [], []
    stub = SimpleNamespace(close=lambda: closed.append(made[-1]))
    monkeypatch.setattr(live, "Engine", lambda config: made.append(config) or stub)
    monkeypatch.setattr(live, "renew", lambda engine, config: None)
    monkeypatch.setattr(live, "warm_up", lambda engine, config: None)
    monkeypatch.setattr(live, "measure", lambda engine, config: len(made))
    plain = load_config("c.yaml").to_dict()
    kept = [{}, {"scheduler.victim": "largest"}, {"workload.num_requests": 2}, {"debug.park_every": 3}, {"request.temperature": 0.5}]
    with LiveRunner() as runner:
        assert [runner.run(load_config(plain, fields)) for fields in kept] == [1] * 5
        another = [{"pool.tokens": 96}, {"scheduler.rows": 3}, {"transfer.mode": "hold"}, {"debug.copy_delay_steps": 2}, {"run.seed": 1}]
        assert [runner.run(load_config(plain, fields)) for fields in another] == [2, 3, 4, 5, 6]
        assert len(closed) == 5
    assert len(closed) == 6


def test_an_interrupt_amid_a_run_leaves_the_finished_ones_with_their_results_and_the_same_command_goes_on(folder, capsys, monkeypatch):
    submitted, plain = [], live.submit

    def submit(engine, one):
        submitted.append(one)
        if len(submitted) == 2 * LOAD["num_requests"] + 3:  # the third run has begun
            assert [row["repeat"] for row in read_results(Path("out"))] == [0, 0], "what came out is written run by run"
            signal.raise_signal(signal.SIGINT)
        return plain(engine, one)

    monkeypatch.setattr(live, "submit", submit)
    assert main(["sweep", "c.yaml", "--output", "out"]) == 130
    told = capsys.readouterr().err
    assert "sweep: 2 of 4 runs finished; 2 not made yet; out\n" in told and "Traceback" not in told
    assert len(read_results(Path("out"))) == 2
    assert main(["sweep", "c.yaml", "--output", "out"]) == 0
    assert "sweep: 2 of 4 runs are finished already\n" in capsys.readouterr().err
    assert len(submitted) == 4 * LOAD["num_requests"] + 3
    assert len({row["outputs_sha256"] for row in read_results(Path("out"))}) == 1


def test_a_load_may_be_patient():
    engine = SimpleNamespace(tokenizer=None, model_config=SimpleNamespace(vocab_size=tiny.VOCAB))
    for is_patient in (True, False):
        asked = live.read_calls(engine, tiny.config(workload__patient=is_patient))
        assert {one.body.params.patient for one in asked} == {is_patient}


def test_every_policy_is_the_schedulers_own_or_takes_another_engine():
    config = tiny.config()
    assert set(live.POLICIES) | set(live.KEPT) | {"host_budget_mib"} == set(type(config.scheduler).model_fields)
    assert {"victim", "resume", "admission", "rotate"} < set(live.POLICIES)
    assert set(live.DEBUG) | set(live.DEBUG_KEPT) == set(type(config.debug).model_fields)
    assert live.made_for(config) != live.made_for(tiny.config(scheduler__overlap=True))
    assert live.made_for(config) != live.made_for(tiny.config(debug__reject_drafts=True))
    assert live.made_for(config) == live.made_for(tiny.config(scheduler__victim="largest"))


def test_a_new_engine_is_warmed_up_and_nothing_of_it_is_in_the_figures(folder):
    config = load_config("c.yaml", {"pool.tokens": 64, "sweep.grid": {}, "workload.num_requests": 1})
    with tiny.engine() as engine:
        live.warm_up(engine, config)
        assert engine.is_idle and engine.scheduler.counters.num_parks > 0 and engine.stats.generated_tokens == 16
        live.renew(engine, config)
        outcome = live.measure(engine, config)
        assert (outcome.figures.num_parks, outcome.figures.num_finished) == (0, 1)
        assert outcome.more["num_decode_steps"] == outcome.lines[0]["num_tokens"] - 1


def test_a_fresh_scheduler_has_the_policies_of_the_run_and_parks_as_they_say(folder):
    config = load_config("c.yaml", {"sweep.grid": {}})
    with LiveRunner() as runner:
        forced = runner.run(load_config(config.to_dict(), {"debug.park_every": 3}))
        calm = runner.run(load_config(config.to_dict(), {"scheduler.admission": "reserve"}))
    assert forced.figures.num_parks > 20 and calm.figures.num_parks == 0
    assert forced.outputs_sha256 == calm.outputs_sha256


def test_a_run_that_cannot_be_is_shown_and_the_others_are_made(folder, capsys):
    words = ["--sweep.grid", "{request.stop: [null, [x]]}", "--sweep.repeats", "1"]
    assert main(["sweep", "c.yaml", "--output", "out", *words]) == 3
    err = capsys.readouterr().err
    assert "stop ['x'], seed 0, repeat 0: failed: stop: this model has no tokenizer, so there is no text to look in" in err
    assert [row["status"] for row in read_results(Path("out"))] == ["finished", "failed"]


def test_what_no_engine_takes_is_told_before_anything_runs(folder, capsys):
    assert main(["sweep", "c.yaml", "--output", "out", "--sweep.grid", "{model.max_len: [128, 4096]}"]) == 2
    assert capsys.readouterr() == ("", "jaxkv: error: model.max_len: got 4096, the model goes to 512; lower it\n")
    assert not Path("out").exists()


def test_a_request_that_can_never_fit_is_refused_and_counted(folder):
    config = load_config(
        "c.yaml", {"workload.prompt_len_max": 90, "workload.lengths": "fixed", "workload.prompt_len_min": 90, "sweep.grid": {}}
    )
    with LiveRunner() as runner:
        outcome = runner.run(config)
    assert (outcome.figures.num_refused, outcome.figures.num_finished) == (5, 0)
    assert outcome.lines[0]["ended"] == "refused" and outcome.lines[0]["error"].startswith(
        "the prompt has 90 tokens, and pool.tokens allows 64"
    )


def test_a_run_made_again_has_the_same_outputs_and_what_differs_is_told(folder, capsys):
    words = ["--sweep.grid", "{scheduler.victim: [smallest]}", "--sweep.repeats", "1", "--request.temperature", "0.8"]
    assert main(["sweep", "c.yaml", "--output", "out", *words]) == 0
    (run,) = Path("out/runs").iterdir()
    digest = json.loads((run / "manifest.json").read_text())["outputs_sha256"]
    capsys.readouterr()
    assert main(["rerun", str(run / "manifest.json"), "--output", "again"]) == 0
    assert capsys.readouterr().out == f"the same: outputs_sha256 {digest}\n"
    assert (Path("again") / "outputs.jsonl").exists()

    lines = [json.loads(line) for line in (run / "outputs.jsonl").read_text().splitlines()]
    lines[2]["token_ids"][7] += 1
    (run / "outputs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["outputs_sha256"], manifest["fingerprint_facts"]["jaxlib"] = "0" * 64, "0.0.1"
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert main(["rerun", str(run)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"not the same: outputs_sha256 was {'0' * 64}, now {digest}"
    assert out[1] == f"first in: request-000002, choice 0, at token 7 of {lines[2]['num_tokens']}"
    assert out[2].startswith("fingerprint_facts.jaxlib: 0.0.1, now ") and len(out) == 3
