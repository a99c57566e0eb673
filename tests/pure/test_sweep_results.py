"""What is made of a sweep: ratios with their spread, pictures, a page, and runs that are made again; on the simulator."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jaxkv.cli.main import main
from jaxkv.sweep import loop
from jaxkv.sweep.compare import compare, parse_side, quantile, ratio_of
from jaxkv.sweep.simulated import run_simulated

CONFIG = """
model: {path: "a <model>"}
pool: {tokens: 512}
workload: {num_requests: 4, prompt_len_min: 8, prompt_len_max: 64, answer_len_min: 20, answer_len_max: 150}
simulate: {processes: 1}
sweep:
  grid: {pool.tokens: [256, 512], scheduler.victim: [smallest, largest]}
  seeds: 3
"""


@pytest.fixture
def swept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)
    assert main(["sweep", "c.yaml", "--output", "out", "--simulate"]) == 0
    capsys.readouterr()
    return tmp_path


# Ratios


def test_a_ratio_is_the_geometric_mean_over_pairs_with_students_interval():
    found = ratio_of("makespan_s", [(1.0, 2.0), (2.0, 4.4), (4.0, 7.2)])
    logs = [math.log(2.0), math.log(2.2), math.log(1.8)]
    middle = sum(logs) / 3
    half = 4.303 * math.sqrt(sum((log - middle) ** 2 for log in logs) / 2) / math.sqrt(3)
    assert (found.num_pairs, found.least, found.most, found.verdict) == (3, 1.8, 2.2, "higher")
    assert (found.ratio, found.low, found.high) == pytest.approx(
        (math.exp(middle), math.exp(middle - half), math.exp(middle + half)), abs=1e-6
    )


def test_a_difference_is_within_noise_where_pairs_do_not_agree():
    assert ratio_of("x", [(1.0, 1.1), (1.0, 0.95), (1.0, 1.02)]).verdict == "within noise"
    assert ratio_of("x", [(1.0, 0.5), (1.0, 0.55), (1.0, 0.45)]).verdict == "lower"
    assert ratio_of("x", [(3.0, 3.0)] * 4).verdict == "within noise"
    assert ratio_of("x", [(1.0, 2.0)]).verdict == "one pair: no spread"
    assert ratio_of("x", [(0, 0)] * 3).verdict == "both 0"
    assert ratio_of("x", [(0, 2.0)] * 3).verdict == "no ratio, one is 0"
    assert ratio_of("x", [(0, 2.0), (1.0, 2.0), (1.0, 2.0)]).num_pairs == 2


def test_students_quantiles_go_on_beyond_the_table():
    assert (quantile(1), quantile(30)) == (12.706, 2.042)
    assert quantile(60) == pytest.approx(2.000, abs=0.003) and quantile(1000) == pytest.approx(1.962, abs=0.002)


def test_runs_are_paired_by_all_that_neither_side_names(swept, capsys):
    found = compare(parse_side("out:scheduler.victim=smallest"), parse_side("out:scheduler.victim=largest"))
    assert (found.num_pairs, found.num_unpaired) == (6, 0)  # two pools, three seeds
    rows = [json.loads(line) for line in Path("out/results.jsonl").read_text().splitlines()]
    by_key = {(r["case"]["scheduler.victim"], r["case"]["pool.tokens"], r["seed"]): r for r in rows}
    pairs = [(by_key["smallest", p, s]["makespan_s"], by_key["largest", p, s]["makespan_s"]) for p in (256, 512) for s in range(3)]
    (makespan,) = [ratio for ratio in found.ratios if ratio.figure == "makespan_s"]
    assert makespan.ratio == pytest.approx(math.prod(b / a for a, b in pairs) ** (1 / 6), abs=1e-6)
    one = compare(parse_side("out:scheduler.victim=smallest,pool.tokens=256"), parse_side("out:scheduler.victim=smallest,pool.tokens=512"))
    assert one.num_pairs == 3


def test_two_sweeps_are_compared_and_the_same_one_is_the_same(swept, capsys):
    assert main(["sweep", "c.yaml", "--output", "two", "--simulate", "--sweep.seeds", "2"]) == 0
    capsys.readouterr()
    assert main(["compare", "out", "two"]) == 0
    out = capsys.readouterr().out
    assert "B over A, 8 pairs" in out and "same bytes" not in out
    assert "4 runs have no partner and are left out" in out and "higher" not in out and "lower" not in out
    assert main(["compare", "out", "two", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_equal_outputs"] is None
    assert [ratio["verdict"] for ratio in found["ratios"] if ratio["ratio"] is not None] == ["within noise"] * 8


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ("none", "out", "none is no sweep's folder: cannot read sweep.json: No such file or directory"),
        ("out:x", "out", "out:x: got 'x', allowed after the folder: field=value, such as out:scheduler.victim=smallest"),
        ("out:pool.tokns=1", "out", "unknown field 'pool.tokns', nearest valid name: pool.tokens"),
        (
            "out:scheduler.rows=8",
            "out",
            "out:scheduler.rows=8: scheduler.rows is not varied there; varied are pool.tokens, scheduler.victim",
        ),
        (
            "out:pool.tokens=7",
            "out",
            "out:pool.tokens=7: no finished run has pool.tokens = 7; there are 256, 512",
        ),
        ("out", "out", "out and out are the same runs; name other values, such as out:scheduler.victim=largest"),
        (
            "out:pool.tokens=256",
            "out",
            "out: several runs differ only in pool.tokens; name a value of each, as field=value",
        ),
        ("out", "empty", "empty: has no finished run"),
        ("out", "other", "out and other: no run of one has the seed, the repeat and the other values of one of the other"),
    ],
)
def test_sides_that_cannot_be_compared_are_one_line(swept, capsys, a, b, message):
    row = json.loads(Path("out/results.jsonl").read_text().splitlines()[0])
    for name, lines in (("empty", []), ("other", [json.dumps({**row, "seed": 99})])):
        Path(name).mkdir()
        Path(name, "sweep.json").write_text(Path("out/sweep.json").read_text())
        Path(name, "results.jsonl").write_text("".join(line + "\n" for line in lines))
    assert main(["compare", a, b]) == 2
    assert capsys.readouterr() == ("", f"jaxkv: error: {message}\n")


# Pictures and the page


class Links(HTMLParser):
    """Everything that a browser would fetch, and the tags that are open."""

    def __init__(self):
        super().__init__()
        self.found, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_report_is_one_page_that_needs_nothing_else(swept, capsys):
    pytest.importorskip("matplotlib")
    rows = Path("out/results.jsonl").read_text().splitlines()
    failed = {**json.loads(rows[0]), "status": "failed", "error": "no <luck>", "commit": "another"}
    Path("out/results.jsonl").write_text("\n".join([*rows, json.dumps(failed)]) + "\n")
    assert main(["report", "out"]) == 0
    files = capsys.readouterr().out.split()
    assert files[-1] == "out/report.html"
    names = {"pressure", "makespan", "pauses", "timeline", "figures"}
    assert {Path(file).name for file in files[:-1]} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert all(Path(file).read_bytes().startswith(b"\x89PNG") for file in files if file.endswith("png"))
    page, links = Path("out/report.html").read_text(), Links()
    links.feed(page)
    assert len(links.found) == 5 and all(link.startswith("data:image/svg+xml;base64,") for link in links.found) and links.open == []
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)
    assert "a &lt;model&gt;" in page and "<model>" not in page and "failed: " in page and "no &lt;luck&gt;" in page
    assert "these runs are of 2 commits: " in page
    assert page.count("<tr>") == 1 + 4 + 1 + 13


def test_pictures_that_do_not_apply_are_left_out(swept, capsys):
    pytest.importorskip("matplotlib")
    words = ["--sweep.grid", "{scheduler.victim: [smallest]}", "--pool.tokens", "8192", "--sweep.seeds", "1"]
    assert main(["sweep", "c.yaml", "--output", "ample", "--simulate", *words]) == 0
    assert main(["report", "ample"]) == 0
    names = {path.stem for path in Path("ample/plots").iterdir()}
    assert names == {"makespan", "timeline", "figures"}


def test_a_sweep_without_a_finished_run_has_nothing_to_draw(swept, capsys):
    Path("out/results.jsonl").write_text("")
    assert main(["report", "out"]) == 2
    assert capsys.readouterr().err == "jaxkv: error: out: has no finished run, so there is nothing to draw\n"


# Runs made again


def one_run():
    return sorted(Path("out/runs").iterdir())[0]


def test_a_simulated_run_made_again_is_the_same_whatever_the_environment_says(swept, capsys, monkeypatch):
    monkeypatch.setenv("JAXKV_POOL__TOKENS", "8192")
    digest = json.loads((one_run() / "manifest.json").read_text())["outputs_sha256"]
    assert main(["rerun", str(one_run())]) == 0
    assert capsys.readouterr().out == f"the same: outputs_sha256 {digest}\n"
    before = json.loads((one_run() / "manifest.json").read_text())
    (one_run() / "manifest.json").write_text(json.dumps({**before, "python": "2.7"}))
    assert main(["rerun", str(one_run() / "manifest.json")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith("beside that, python: 2.7, now 3.")


def test_another_outcome_names_the_first_sequence_that_differs(swept, capsys, monkeypatch):
    import dataclasses

    def other(config):
        outcome = run_simulated(config)
        lines = [line | ({"end_s": 1.5} if line["custom_id"] == "request-000002" else {}) for line in outcome.lines]
        return dataclasses.replace(outcome, outputs_sha256="1" * 64, lines=lines)

    monkeypatch.setattr(loop, "run_simulated", other)
    assert main(["rerun", str(one_run())]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith(f"now {'1' * 64}")
    assert out[1:] == ["first in: request-000002, choice 0", "nothing that is recorded of version, machine and model differs"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: (run / "manifest.json").unlink(), "cannot read the manifest {run}/manifest.json: No such file or directory"),
        (
            lambda run: (run / "manifest.json").write_text("x"),
            "{run}/manifest.json is not valid JSON: Expecting value: line 1 column 1 (char 0)",
        ),
        (
            lambda run: (run / "manifest.json").write_text('{"schema_version": 9}'),
            "{run}/manifest.json: its schema_version is 9, this one reads 1; use the version that wrote it",
        ),
        (
            lambda run: (run / "manifest.json").write_text('{"schema_version": 1, "status": "failed"}'),
            "{run}/manifest.json: the run is failed, so there is nothing to compare with",
        ),
        (
            lambda run: (run / "manifest.json").write_text('{"schema_version": 1, "key": "k", "kind": "simulated", "case": {}, "seed": 0}'),
            "{run}/manifest.json: config_sha256, input_sha256, repeat, status missing, so it is no manifest of a run",
        ),
        (
            lambda run: (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("rows: 8", "rows: 7")),
            "{run}/config.yaml is not what the run was made with: its config_sha256 is another than in manifest.json",
        ),
    ],
)
def test_what_cannot_be_made_again_is_one_line(swept, capsys, change, message):
    run = one_run()
    change(run)
    assert main(["rerun", str(run)]) == 2
    assert capsys.readouterr() == ("", f"jaxkv: error: {message.replace('{run}', str(run))}\n")


def test_input_that_has_changed_and_a_folder_that_is_there_are_refused(swept, capsys):
    Path("p.txt").write_text("one")
    words = ["--workload.prompts", "[p.txt]", "--sweep.grid", "{scheduler.victim: [smallest]}", "--sweep.seeds", "1"]
    assert main(["sweep", "c.yaml", "--output", "text", "--simulate", *words]) == 0
    (run,) = Path("text/runs").iterdir()
    Path("p.txt").write_text("two")
    capsys.readouterr()
    assert main(["rerun", str(run)]) == 2
    assert capsys.readouterr().err == (
        f"jaxkv: error: {run}/manifest.json: the run's input is not there any more: "
        "files of workload.prompts or workload.trace have changed\n"
    )
    assert main(["rerun", str(one_run()), "--output", "out"]) == 2
    assert capsys.readouterr().err == "jaxkv: error: --output out: exists already; choose another folder\n"


def test_a_run_that_fails_this_time_is_told(swept, capsys, monkeypatch):
    monkeypatch.setattr(loop, "run_simulated", lambda config: 1 / 0)
    assert main(["rerun", str(one_run())]) == 2
    assert capsys.readouterr().err == "jaxkv: error: the run failed this time: ZeroDivisionError: division by zero\n"
