"""The simulator: clocks and costs checked by hand, the very scheduler of the engine, groups, callers that leave, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from jaxkv.cli.main import main
from jaxkv.config import load_config
from jaxkv.errors import ConfigError
from jaxkv.scheduler.plan import SchedulerConfig
from jaxkv.scheduler.scheduler import Scheduler
from jaxkv.simulate import Costs, Request, run_sweep, simulate
from jaxkv.simulate.cases import list_cases
from jaxkv.simulate.result import Story, fairness
from jaxkv.simulate.timeline import PoolTimeline

MODEL = {"model": {"path": "x"}}
SMALL = {
    "pool.tokens": 512,
    "workload.answer_len_min": 20,
    "workload.answer_len_max": 200,
    "workload.prompt_len_max": 64,
    "workload.prompt_len_min": 8,
    "sweep.seeds": 2,
    "simulate.processes": 1,
}
FREE = {"step_s": 0.0, "decode_s": 0.0, "decode_longest_s": 0.0, "decode_token_s": 0.0, "prefill_s": 0.0, "prefill_token_s": 0.0}
NOTHING = Costs(**FREE, copy_s=0.0, land_s=0.0)


def settings(**fields):
    return SchedulerConfig(
        **{"rows": 2, "num_pages": 16, "page_size": 16, "prefill_chunk": 32, "max_len": 256, "chunk_bytes": 100, **fields}
    )


def run(requests, costs=NOTHING, num_staging=8, watcher=None, **fields):
    return simulate(settings(**fields), requests, costs, num_staging, watcher)


def config(**fields):
    return load_config(MODEL, {**SMALL, **{name.replace("__", "."): value for name, value in fields.items()}})


# The clock


def test_a_lone_request_takes_its_chunks_and_its_steps_and_nothing_else():
    costs = Costs(0.5, 1.0, 0.25, 0.125, 10.0, 0.5, 100.0, 1000.0)
    result, (story,) = run([Request(0.0, 40, 3, 3)], costs)
    chunks = 2 * 10.0 + 0.5 * 32  # from 0 and from 32
    steps = 2 * 1.0 + 0.375 * (40 + 41)  # the first token is the last chunk's; then positions 40 and 41
    assert result.makespan_s == pytest.approx(4 * 0.5 + chunks + steps)
    assert (story.num_tokens, story.num_parks, story.ended, result.num_steps) == (3, 0, "finished", 4)
    assert (result.longest_wait_s, result.total_wait_s, result.fairness, result.host_bytes) == (0, 0, 1.0, 0)
    assert result.tokens_per_s == pytest.approx(3 / result.makespan_s)


def test_two_rows_cost_the_longest_once_and_every_token():
    costs = Costs(**{**FREE, "decode_longest_s": 1.0, "decode_token_s": 0.01}, copy_s=0.0, land_s=0.0)
    result, _ = run([Request(0.0, 10, 2, 2), Request(0.0, 30, 2, 2)], costs)
    assert result.makespan_s == pytest.approx((10 + 0.10) + (30 + 0.30))  # the second's chunk runs beside the first's step
    result, _ = run([Request(0.0, 30, 3, 3), Request(0.0, 10, 2, 2)], costs)
    assert result.makespan_s == pytest.approx((30 + 0.30) + (31 + 0.31 + 0.10))


def test_a_request_that_comes_later_is_waited_for_without_steps():
    costs = Costs(**{**FREE, "step_s": 1.0}, copy_s=0.0, land_s=0.0)
    result, (first, second) = run([Request(0.0, 10, 1, 1), Request(50.0, 10, 1, 1)], costs)
    assert (first.end_s, second.end_s, result.makespan_s, result.num_steps) == (1.0, 51.0, 51.0, 2)
    assert second.took_s == 1.0 and second.line_s == 0.0


def test_a_wait_in_the_line_counts_from_the_arrival():
    costs = Costs(**{**FREE, "step_s": 1.0}, copy_s=0.0, land_s=0.0)
    result, (_, second) = run([Request(0.0, 10, 5, 5), Request(0.5, 10, 1, 1)], costs, rows=1)
    assert (second.line_s, second.end_s, result.longest_wait_s, result.longest_pause_s) == (4.5, 6.0, 4.5, 0)


def test_copies_arrive_one_after_another_and_a_pause_lasts_until_it_runs_again():
    costs = Costs(**{**FREE, "step_s": 1.0}, copy_s=0.0, land_s=0.25)
    result, stories = run([Request(0.0, 100, 60, 60), Request(0.0, 90, 60, 60)], costs, chunk_pages=4, margin_steps=0)
    parked = stories[1]
    assert (result.num_parks, result.num_restores, result.num_finished) == (1, 1, 2)
    assert (stories[0].num_parks, parked.num_parks, len(parked.pauses_s)) == (0, 1, 1)
    assert result.longest_pause_s == parked.pauses_s[0] == result.total_wait_s
    assert result.host_bytes == result.device_bytes == result.host_peak_bytes == 200  # 7 pages in chunks of 4
    away = stories[0].end_s - (parked.end_s - parked.pauses_s[0])
    assert parked.pauses_s[0] == pytest.approx(away + parked.end_s - stories[0].end_s)
    assert parked.end_s > stories[0].end_s


def test_a_chunk_that_leaves_costs_its_step():
    requests = [Request(0.0, 100, 60, 60), Request(0.0, 90, 60, 60)]
    fields = {"chunk_pages": 4, "margin_steps": 0}
    free, _ = run(requests, Costs(**{**FREE, "step_s": 1.0}, copy_s=0.0, land_s=0.0), **fields)
    paid, _ = run(requests, Costs(**{**FREE, "step_s": 1.0}, copy_s=0.125, land_s=0.0), **fields)
    assert paid.makespan_s - free.makespan_s == pytest.approx(4 * 0.125)  # two out, two back


def test_without_host_memory_what_was_computed_is_computed_again_and_takes_its_time():
    requests = [Request(0.0, 100, 60, 60), Request(0.0, 90, 60, 60)]
    costs = Costs(**{**FREE, "step_s": 1.0}, copy_s=0.0, land_s=0.0)
    copied, _ = run(requests, costs, margin_steps=0)
    again, stories = run(requests, costs, margin_steps=0, host_budget_bytes=0)
    assert (copied.num_parks, copied.num_parks_dropped, copied.num_replayed_tokens) == (1, 0, 0)
    assert (again.num_parks, again.num_parks_dropped, again.num_finished, again.host_bytes) == (1, 1, 2, 0)
    cells = again.num_replayed_tokens
    assert 100 < cells < 130 and [story.num_tokens for story in stories] == [60, 60]
    chunks = 3  # of its prompt; every other cell takes a step of its own
    assert again.num_steps - copied.num_steps == chunks + cells - 90
    assert (
        again.longest_pause_s - copied.longest_pause_s == again.makespan_s - copied.makespan_s == chunks + cells - 90 - 1
    )  # a step's copy


def test_no_more_chunks_are_in_flight_than_staging_holds(monkeypatch):
    free = []
    plain = Scheduler.plan
    monkeypatch.setattr(Scheduler, "plan", lambda self, now, free_chunks: free.append(free_chunks) or plain(self, now, free_chunks))
    requests = [Request(0.0, 100, 60, 60), Request(0.0, 90, 60, 60)]
    costs = Costs(**{**FREE, "step_s": 1.0}, copy_s=0.0, land_s=3.0)
    result, _ = run(requests, costs, num_staging=2, chunk_pages=1, margin_steps=0)
    assert result.num_finished == 2 and result.num_parks == 1
    assert {*free} == {0, 1, 2}


def test_prompts_go_first_where_all_are_patient():
    requests = [Request(0.0, 32, 10, 10, patient=patient) for patient in (True, True)]
    apart = [Request(0.0, 32, 10, 10), Request(0.0, 32, 10, 10)]
    assert run(requests)[0].num_steps == 2 + 9 == run(apart)[0].num_steps
    costs = Costs(**{**FREE, "decode_s": 1.0, "prefill_s": 1.0})
    assert run(requests, costs)[0].makespan_s == 2 + 9  # two chunks, then nine steps of both
    assert run(apart, costs)[0].makespan_s == 2 + 9 + 1  # the first decodes beside the second's chunk
    assert run(requests, costs, prefill_burst=1)[0].makespan_s == 2 + 9 + 1


def test_a_request_of_a_lower_priority_goes_first():
    requests = [Request(0.0, 100, 50, 50), Request(0.0, 100, 50, 50), Request(0.0, 100, 50, 50, -1)]
    costs = Costs(**{**FREE, "step_s": 1.0}, copy_s=0.0, land_s=0.0)
    _, stories = run(requests, costs, rows=1)
    assert [story.line_s for story in stories] == [53.0, 106.0, 0.0]  # 4 chunks and 49 more tokens each


def test_a_request_may_ask_for_more_than_it_makes():
    result, (story,) = run([Request(0.0, 10, 4, 100)])
    assert (story.num_tokens, story.ended, result.num_finished) == (4, "finished", 1)


def test_the_pool_ends_an_answer_and_refuses_a_prompt_that_cannot_fit():
    result, stories = run([Request(0.0, 250, 50, 50), Request(0.0, 300, 5, 5)])
    assert [story.ended for story in stories] == ["finished", "refused"]
    assert (stories[0].num_tokens, result.num_refused, result.num_finished) == (7, 1, 1)  # 256 - 250 + 1


def test_the_simulated_scheduler_is_the_engines_own(monkeypatch):
    plans = []
    plain = Scheduler.plan

    def plan(self, now, free_chunks):
        plans.append((now, free_chunks))
        return plain(self, now, free_chunks)

    monkeypatch.setattr(Scheduler, "plan", plan)
    result, _ = run([Request(0.0, 40, 3, 3)], Costs(**{**FREE, "step_s": 2.0}, copy_s=0.0, land_s=0.0), num_staging=5)
    assert plans == [(0.0, 5), (2.0, 5), (4.0, 5), (6.0, 5)] and result.num_steps == 4


def test_a_caller_that_leaves_gives_its_room_back_at_once():
    costs = Costs(**{**FREE, "step_s": 1.0}, copy_s=0.0, land_s=0.0)
    result, (first, second) = run([Request(0.0, 10, 50, 50, cancel_after=5), Request(0.0, 10, 3, 3)], costs, rows=1)
    assert (first.ended, first.num_tokens, first.end_s) == ("cancelled", 5, 5.0)
    assert (second.ended, second.line_s, second.end_s) == ("finished", 5.0, 8.0)
    assert (result.num_cancelled, result.num_finished, result.num_failed) == (1, 1, 0)


def test_one_that_would_leave_after_its_end_ends_by_itself():
    result, (story,) = run([Request(0.0, 10, 4, 4, cancel_after=9)])
    assert (story.ended, story.num_tokens, result.num_cancelled) == ("finished", 4, 0)


def test_the_choices_of_a_group_share_the_pages_of_their_prompt():
    costs = Costs(**{**FREE, "prefill_s": 1.0}, copy_s=0.0, land_s=0.0)
    group, stories = run([Request(0.0, 65, 3, 3, n=2)], costs)
    assert [(story.num_tokens, story.ended) for story in stories] == [(3, "finished")] * 2
    apart, _ = run([Request(0.0, 65, 3, 3)] * 2, costs)
    assert (group.makespan_s, apart.makespan_s) == (3.0, 6.0)  # 3 chunks of 32, for both or for each


def test_prompts_that_begin_alike_compute_the_beginning_once_where_it_is_kept():
    costs = Costs(**{**FREE, "prefill_s": 1.0}, copy_s=0.0, land_s=0.0)
    requests = [Request(0.0, 80, 1, 1, shared_len=64), Request(100.0, 80, 1, 1, shared_len=64)]
    kept, _ = run(requests, costs, prefix_cache=True)
    alone, _ = run(requests, costs, prefix_cache=False)
    assert (kept.makespan_s, alone.makespan_s) == (101.0, 103.0)


def test_the_same_load_gives_the_same_figures():
    case = list_cases(config())[0]
    runs = [simulate(case.settings, case.requests(1), case.costs, case.num_staging) for _ in range(2)]
    assert runs[0] == runs[1] and runs[0][0].num_parks > 0


def test_fairness_is_one_for_equals_and_one_over_n_when_one_has_it_all():
    def story(tokens, seconds):
        return Story(0.0, seconds, tokens, 0, 0.0, (), "finished")

    assert fairness([story(10, 5.0), story(20, 10.0)]) == 1.0
    assert fairness([story(10, 1.0), story(0, 1.0), story(0, 1.0), story(0, 1.0)]) == 0.25
    assert fairness([]) == 1.0


def test_who_held_the_pool_never_adds_up_to_more_than_there_is():
    timeline = PoolTimeline()
    result, _ = run([Request(0.0, 100, 60, 60), Request(0.0, 90, 60, 60)], Costs(), watcher=timeline)
    assert timeline.num_pages == 16 and max(sum(held.values()) for held in timeline.pages) == 16
    assert timeline.times == sorted(timeline.times) and len(timeline.times) == len(timeline.pages)
    assert [len(spans) for spans in timeline.parked.values()] == [result.num_parks]
    thin = timeline.thinned(4)
    assert len(thin.times) <= 10 and thin.times[-1] == timeline.times[-1]


# Costs


def test_costs_come_from_the_section_then_the_file_then_the_defaults(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"costs": {**Costs().to_dict(), "decode_s": 7.0, "copy_s": 8.0}, "machine": "any"}))
    section = load_config(MODEL, {"simulate.costs": str(file), "simulate.copy_s": 9.0}).simulate
    assert Costs.of(section) == Costs(decode_s=7.0, copy_s=9.0)
    assert Costs.of(load_config(MODEL).simulate) == Costs()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"costs.json is not valid JSON: Expecting"),
        ('{"costs": {"step_s": 1}}', r"costs.json must hold `costs` with step_s, .*token_bytes: write it with `jaxkv calibrate"),
        (json.dumps({"costs": {**Costs().to_dict(), "decode_s": -1}}), r"costs.json: decode_s: got -1, allowed: number >= 0$"),
        (json.dumps({"costs": {**Costs().to_dict(), "token_bytes": 0}}), r"costs.json: token_bytes: got 0, allowed: integer >= 1$"),
    ],
)
def test_a_costs_file_that_is_none_is_one_line(tmp_path, content, message):
    file = tmp_path / "costs.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        Costs.of(load_config(MODEL, {"simulate.costs": str(file)}).simulate)
    with pytest.raises(ConfigError, match=r"cannot read the costs .*none.json: No such file or directory$"):
        Costs.of(load_config(MODEL, {"simulate.costs": str(tmp_path / "none.json")}).simulate)


def test_a_step_waits_for_its_copies_where_they_block():
    blocking, beside = (list_cases(config(transfer__blocking=value))[0].costs for value in (True, False))
    assert beside == Costs()
    assert blocking == Costs(copy_s=Costs().copy_s + Costs().land_s, land_s=0.0)


# Sweeps


def test_a_sweep_runs_every_combination_with_every_seed():
    grid = {"scheduler.victim": ["smallest", "largest"], "pool.tokens": [512, 4096]}
    told = []
    sweep = run_sweep(config(sweep__grid=grid), lambda done, total: told.append((done, total)))
    assert [outcomes.case.name for outcomes in sweep] == [
        "victim smallest, tokens 512",
        "victim smallest, tokens 4096",
        "victim largest, tokens 512",
        "victim largest, tokens 4096",
    ]
    assert [len(outcomes.results) for outcomes in sweep] == [2, 2, 2, 2]
    assert told == [(done, 8) for done in range(9)]
    assert sweep[0].results[0].num_parks > 0 and sweep[1].results[0].num_parks == 0


def test_values_of_a_zip_go_together_in_every_combination_of_the_grid():
    grid, lines = {"scheduler.victim": ["smallest", "largest"]}, {"pool.tokens": [512, 1024], "scheduler.rows": [2, 4]}
    assert [case.name for case in list_cases(config(sweep__grid=grid, sweep__zip=lines))] == [
        "victim smallest, tokens 512, rows 2",
        "victim smallest, tokens 1024, rows 4",
        "victim largest, tokens 512, rows 2",
        "victim largest, tokens 1024, rows 4",
    ]


def test_processes_change_no_figure():
    grid = {"scheduler.victim": ["smallest", "largest"]}
    one, two = (run_sweep(config(sweep__grid=grid, simulate__processes=num)) for num in (1, 2))
    assert [outcomes.results for outcomes in one] == [outcomes.results for outcomes in two]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workload__kind": "heavi"}, "workload.kind: got 'heavi', allowed: uniform | heavy | poisson | bursty | measured"),
        ({"workload__lengths": "x"}, "workload.lengths: got 'x', allowed: fixed | uniform | lognormal | heavy | trace | null"),
        ({"workload__every_s": -1}, "workload.every_s: got -1, allowed: number >= 0"),
        ({"workload__num_requests": -1}, "workload.num_requests: got -1, allowed: integer >= 1"),
        ({"simulate__decode_s": -0.1}, "simulate.decode_s: got -0.1, allowed: number >= 0 | null"),
        (
            {"workload__answer_len_min": 300},
            "workload.answer_len_min: got 300, more than workload.answer_len_max, which is 200: swap or change them",
        ),
        (
            {"workload__kind": "measured"},
            "workload.trace: is missing, and the lengths or arrivals are to come from it; name the file",
        ),
        ({"sweep__grid": {"scheduler.victim": "smallest"}}, "sweep.grid: got "),
        ({"sweep__seeds": 0}, "sweep.seeds: got 0, allowed: integer >= 1"),
        ({"sweep__grid": {"scheduler.victm": ["x"]}}, "unknown field 'scheduler.victm', nearest valid name: scheduler.victim"),
        ({"sweep__grid": {"scheduler.victim": ["big"]}}, "scheduler.victim: got 'big', allowed: smallest | "),
        ({"sweep__grid": {"scheduler.victim": []}}, "sweep.grid: scheduler.victim has no values; name some, or leave it out"),
        ({"sweep__grid": {"sweep.seeds": [1]}}, "sweep.grid: sweep.seeds says what is compared and cannot be compared itself; take it out"),
        (
            {"sweep__grid": {"pool.tokens": [512]}, "sweep__zip": {"pool.tokens": [1024]}},
            "sweep: pool.tokens stands in grid and in zip, so two axes would set it; take it out of one of them",
        ),
        (
            {"sweep__zip": {"pool.tokens": [512, 1024], "scheduler.rows": [2]}},
            "sweep.zip: its lists go together, value by value, and must be of one length: pool.tokens has 2, scheduler.rows has 1",
        ),
        (
            {"sweep__zip": {"workload.seed": [1, 2]}},
            "sweep.seeds: got 2, which sets workload.seed, as sweep.zip does; take one of them out",
        ),
        ({"sweep__zip": {"scheduler.rows": []}}, "sweep.zip: scheduler.rows has no values; name some, or leave it out"),
        (
            {"sweep__grid": {"pool.page_size": [8], "pool.page-size": [8]}},
            "sweep.grid: one field stands twice, with dashes and with underscores",
        ),
        (
            {"sweep__grid": {"scheduler.overlap": [False, True]}},
            "sweep: scheduler.overlap is varied, and the simulator knows nothing of it: all would come out the same; take it out, or "
            "ask the engine (`jaxkv sweep` without --simulate)",
        ),
        ({"sweep__zip": {"speculate.kind": ["none", "ngram"]}}, "sweep: speculate.kind is varied, and the simulator knows nothing of it: "),
        ({"sweep__grid": {"transfer.blocking": [True, True]}}, "sweep: the case blocking true stands twice; take one out"),
        (
            {"speculate__kind": "ngram"},
            "speculate.kind: got ngram, and the simulator knows no guesses, of which only a model says how many come true; set it to none, "
            "or ask the engine",
        ),
        (
            {"pool__tokens": None},
            "pool.tokens: null takes a share of the device's memory, and a simulation has no device; set it",
        ),
        (
            {"pool__page_size": 1024, "scheduler__prefill_chunk": 1, "pool__tokens": 512},
            "the pool holds 0 tokens in whole pages of 1024, less than one prompt chunk of 1: ",
        ),
        (
            {"transfer__staging_mib": 1},
            "transfer.staging_mib: got 1, one chunk of 16 pages takes 11.2 MiB; raise it to 12 or lower transfer.chunk_pages",
        ),
    ],
)
def test_what_cannot_be_simulated_is_one_line_before_anything_runs(fields, message, monkeypatch):
    monkeypatch.setattr(Scheduler, "plan", None)
    with pytest.raises(ConfigError) as error:
        run_sweep(config(**fields))
    assert str(error.value).startswith(message)


# The command

WORDS = ["simulate", "c.yaml", *(word for name, value in SMALL.items() for word in (f"--{name}", str(value)))]
GRID = ["--sweep.grid", "{scheduler.victim: [smallest, largest]}"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("model: {path: x}\n")
    return tmp_path


def test_the_table_has_a_line_for_each_case(folder, capsys):
    assert main([*WORDS, *GRID]) == 0
    out, err = capsys.readouterr()
    assert "means over 2 seeds" in out and err == ""
    for word in ("makespan s", "longest wait s", "mean completion s", "total waiting s", "parks", "copied MiB", "fairness"):
        assert word in out
    assert re.search(r"victim smallest +│ +\d+\.\d │ +1\.\d{3} ", out) and "victim largest" in out


def test_every_run_is_written_as_a_line_and_the_means_as_json(folder, capsys):
    assert main([*WORDS, *GRID, "--results", "r.jsonl", "--json"]) == 0
    runs = [json.loads(line) for line in Path("r.jsonl").read_text().splitlines()]
    cases = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(run["case"]["scheduler.victim"], run["seed"]) for run in runs] == [
        *(("smallest", 0), ("smallest", 1), ("largest", 0), ("largest", 1)),
    ]
    assert cases[0]["makespan_s"] == pytest.approx((runs[0]["makespan_s"] + runs[1]["makespan_s"]) / 2, abs=1e-5)
    assert cases[1]["case"] == {"scheduler.victim": "largest"} and cases[1]["seeds"] == 2


def test_plots_are_png_and_svg_and_the_same_every_time(folder, capsys):
    pytest.importorskip("matplotlib")
    for name in ("one", "two"):
        assert main([*WORDS, *GRID, "--plots", name]) == 0
    files = sorted(path.name for path in Path("one").iterdir())
    assert files == ["figures.png", "figures.svg", "timeline.png", "timeline.svg"]
    assert all((Path("one") / file).read_bytes() == (Path("two") / file).read_bytes() for file in files)
    assert (Path("one") / "figures.png").read_bytes().startswith(b"\x89PNG")
    svg = (Path("one") / "figures.svg").read_text()
    assert "victim smallest" in svg and "longest wait s" in svg


def test_a_place_that_cannot_be_written_is_told_before_anything_runs(folder, capsys, monkeypatch):
    monkeypatch.setattr(Scheduler, "plan", None)
    assert main([*WORDS, "--results", "no/r.jsonl"]) == 2
    assert capsys.readouterr().err == "jaxkv: error: --results no/r.jsonl: there is no folder no\n"
    pytest.importorskip("matplotlib")
    assert main([*WORDS, "--plots", "c.yaml"]) == 2
    assert capsys.readouterr().err == "jaxkv: error: --plots c.yaml: no folder can be made there: File exists\n"


def test_the_simulator_brings_in_neither_jax_nor_numpy(run_python):
    source = "import sys, jaxkv.simulate, jaxkv.cli.simulate; print(sorted({'jax', 'flax', 'numpy', 'matplotlib'} & set(sys.modules)))"
    assert run_python(source) == "[]\n"
