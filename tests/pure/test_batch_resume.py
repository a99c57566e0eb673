"""A job that is started again: only what is missing is done, and only where it is the same job."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from jaxkv.batch.interface import Inspected
from jaxkv.batch.read import find_sources, scan
from jaxkv.errors import ConfigError
from jaxkv.testing import FakeEngine
from tests.pure.batch_jobs import Ran, config, entries, line, run, write

SLOW_JOB = """
import sys
from jaxkv.batch import run_batch
from jaxkv.config import load_config
from jaxkv.testing import FakeEngine
sys.exit(run_batch(lambda: FakeEngine(rows=2, step_s=0.01), load_config({"model": {"path": "fake"}}), ["in.jsonl"], "out.jsonl", "s.json"))
"""


def start(folder: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, "-c", SLOW_JOB], cwd=folder, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_lines(path: Path, count: int) -> None:
    end = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < end, f"no {count} lines within a minute"
        time.sleep(0.005)


def answers(ran: Ran) -> dict[str, object]:
    return {name: entry["response"]["body"].get("choices") for name, entry in ran.by_id.items()}


def undisturbed(folder: Path, source: Path) -> Ran:
    folder.mkdir()
    return run(folder, source)


def test_a_job_killed_in_the_middle_loses_no_finished_line_and_goes_on(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", "broken", *(line(f"q{n}", return_token_ids=True) for n in range(30)))
    job = start(tmp_path)
    wait_for_lines(tmp_path / "out.jsonl", 8)
    job.kill()
    job.communicate()
    assert job.returncode == -signal.SIGKILL
    before = (tmp_path / "out.jsonl").read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    assert 8 <= whole.count(b"\n") < 31
    ran = run(tmp_path, source)
    assert ran.code == 3
    assert (tmp_path / "out.jsonl").read_bytes().startswith(whole)
    assert len(ran.entries) == 31
    assert ran.summary["num_earlier"] == whole.count(b"\n")
    alone = undisturbed(tmp_path / "alone", source)
    assert answers(ran) == answers(alone)
    assert ran.summary["outputs_sha256"] == alone.summary["outputs_sha256"]
    same = ("num_requests", "num_completed", "num_failed", "prompt_tokens", "generated_tokens")
    assert [ran.summary[name] for name in same] == [alone.summary[name] for name in same]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_job_keeps_its_lines_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals, code: int) -> None:
    source = write(tmp_path / "in.jsonl", *(line(f"q{n}") for n in range(30)))
    job = start(tmp_path)
    wait_for_lines(tmp_path / "out.jsonl", 3)
    job.send_signal(number)
    _, said = job.communicate(timeout=60)
    assert job.returncode == code
    kept = entries(tmp_path / "out.jsonl")
    assert f"batch: interrupted; {len(kept)} finished lines are kept in out.jsonl, and the same command goes on from there" in said
    assert "Traceback" not in said
    ran = run(tmp_path, source)
    assert (ran.code, len(ran.entries), ran.summary["num_earlier"]) == (0, 30, len(kept))


def test_a_torn_last_line_is_cut_and_its_request_done_again(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"), line("b"))
    first = run(tmp_path)
    out = tmp_path / "out.jsonl"
    out.write_bytes(out.read_bytes()[:-30])
    again = run(tmp_path)
    assert "was cut short by a kill; its request is done again" in again.said
    assert (answers(again), again.summary["outputs_sha256"]) == (answers(first), first.summary["outputs_sha256"])


def test_a_finished_job_loads_no_model_and_tells_the_same_summary(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"), "broken", line("a"))
    first, again = run(tmp_path), run(tmp_path)
    assert (len(first.engines), len(again.engines), again.code) == (1, 0, 3)
    assert "nothing is missing, so no model is loaded" in again.said
    same = ("num_requests", "num_failed", "generated_tokens", "outputs_sha256", "system_fingerprint")
    assert [first.summary[name] for name in same] == [again.summary[name] for name in same]
    assert (again.summary["num_earlier"], again.entries) == (3, first.entries)


def test_what_no_byte_depends_on_may_change_between_runs(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    run(tmp_path)
    assert run(tmp_path, settings=config(pool__tokens=640, debug__park_every=4)).code == 0


def test_another_input_is_refused_unless_forced(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    run(tmp_path)
    write(tmp_path / "in.jsonl", line("b"), "broken", line("a"))
    with pytest.raises(ConfigError, match=r"was begun by another job: the input's content\. Choose another --output.*or --force to keep"):
        run(tmp_path)
    ran = run(tmp_path, force=True)
    assert [entry["custom_id"] for entry in ran.entries] == ["a", None, "b"]
    assert len(run(tmp_path).entries) == 3  # the forced job is now the job


def test_another_seed_or_default_is_refused_and_named(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    run(tmp_path)
    changed = config(run__seed=1, request__temperature=0.5)
    with pytest.raises(ConfigError, match=r"run\.seed \(0, now 1\); request\.temperature \(null, now 0\.5\)"):
        run(tmp_path, settings=changed)
    assert run(tmp_path, settings=changed, force=True).code == 0


def test_another_model_is_refused_even_when_nothing_is_missing(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    run(tmp_path)
    with pytest.raises(ConfigError, match=r"the model or its settings \(scheduler\.rows 8, now 4\)"):
        run(tmp_path, settings=config(scheduler__rows=4), make=lambda: FakeEngine(fingerprint="fp_other"))


def test_speculation_is_part_of_the_job_even_when_nothing_is_missing(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    run(tmp_path)
    with pytest.raises(ConfigError, match=r"the model or its settings \(speculate\.kind none, now ngram\)"):
        run(tmp_path, settings=config(speculate__kind="ngram"), make=lambda: FakeEngine(fingerprint="fp_other"))


def test_the_same_settings_with_another_fingerprint_are_refused_when_something_is_missing(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"), line("b", temperature=9))
    run(tmp_path)
    before = entries(tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="system_fingerprint fp_fake, now fp_other"):
        run(tmp_path, make=lambda: FakeEngine(fingerprint="fp_other"), retry_failed=True)
    assert entries(tmp_path / "out.jsonl") == before


def model(**facts: object) -> Inspected:
    """A model's headers."""
    return Inspected(257, True, {"rows": 8, "model": {"num_layers": 3}, **facts})


def test_what_changes_answers_is_refused_before_the_engine_is_made(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"), line("b", temperature=9))
    run(tmp_path, inspect=model)
    before = entries(tmp_path / "out.jsonl")

    def make() -> FakeEngine:
        raise AssertionError("the engine was made")

    options = {"make": make, "retry_failed": True}
    with pytest.raises(ConfigError, match=r"the model or its settings \(scheduler\.rows 8, now 4\)"):
        run(tmp_path, settings=config(scheduler__rows=4), inspect=lambda: model(rows=4), **options)
    with pytest.raises(ConfigError, match=r"the model or its settings \(model\)"):
        run(tmp_path, inspect=lambda: model(model={"num_layers": 4}), **options)
    assert entries(tmp_path / "out.jsonl") == before
    assert run(tmp_path, settings=config(scheduler__rows=4), inspect=lambda: model(rows=4), force=True).code == 3


def test_settings_that_come_to_the_same_are_the_same_job(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"), line("b", temperature=9))
    run(tmp_path, inspect=model)
    ran = run(tmp_path, settings=config(model__dtype="float32"), inspect=model, retry_failed=True)
    assert (ran.code, len(ran.engines)) == (3, 1)


def test_a_header_from_before_facts_were_kept_is_judged_by_the_fingerprint(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"), line("b", temperature=9))
    run(tmp_path)
    path = tmp_path / "out.jsonl.job.json"
    header = json.loads(path.read_text())
    assert header.pop("facts") is None
    path.write_text(json.dumps(header))
    assert run(tmp_path, inspect=model, retry_failed=True).code == 3


def test_a_default_that_the_model_cannot_take_is_refused_before_the_engine_is_made(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"))

    def make() -> FakeEngine:
        raise AssertionError("the engine was made")

    settings = config(request__logit_bias={"257": 1.0})
    with pytest.raises(ConfigError, match=r"request\.logit_bias key: got .257., allowed: a token id from 0 to 256"):
        run(tmp_path, make=make, settings=settings, inspect=model)
    with pytest.raises(ConfigError, match=r"request\.stop: this model has no tokenizer"):
        run(tmp_path, make=make, settings=config(request__stop=["x"]), inspect=lambda: Inspected(257, False, {}))
    assert run(tmp_path, settings=config(request__stop=["x"]), inspect=model).code == 0


def test_another_name_for_the_same_model_is_the_same_job(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    run(tmp_path)
    assert run(tmp_path, settings=config(model__path="./fake")).code == 0


def test_retry_failed_does_error_lines_again_and_keeps_the_answers(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"), line("b", "boom"), "broken")
    first = run(tmp_path, make=lambda: FakeEngine(failing=["boom"]))
    assert (first.code, first.summary["num_failed"]) == (3, 2)
    assert run(tmp_path).summary["num_failed"] == 2
    again = run(tmp_path, retry_failed=True)
    assert sorted(again.texts) == ["a", "b"]
    assert (again.code, again.summary["num_failed"], len(again.entries)) == (3, 1, 3)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_file_that_no_job_wrote_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    (tmp_path / "out.jsonl").write_text("my notes")
    with pytest.raises(ConfigError, match=r"is not empty, but out\.jsonl\.job\.json is missing, .*--force to add what is missing"):
        run(tmp_path)
    assert (tmp_path / "out.jsonl").read_text() == "my notes"
    (tmp_path / "out.jsonl").write_text("my notes\n")
    with pytest.raises(ConfigError, match="line 1: is no line of a batch job's output"):
        run(tmp_path, force=True)


def test_an_output_whose_header_is_lost_goes_on_when_forced(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"), line("b"))
    first = run(tmp_path)
    (tmp_path / "out.jsonl.job.json").unlink()
    assert run(tmp_path, force=True).entries == first.entries


def test_a_removed_output_starts_the_job_afresh(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    run(tmp_path)
    (tmp_path / "out.jsonl").unlink()
    assert len(run(tmp_path, settings=config(run__seed=9)).entries) == 1


def test_two_jobs_do_not_write_one_output(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"))

    def second() -> FakeEngine:
        with pytest.raises(ConfigError, match="another job is writing it"):
            run(tmp_path)
        return FakeEngine()

    assert run(tmp_path, make=second).code == 0


def test_lines_without_a_custom_id_are_not_told_twice(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"), line("a"), "broken", line("b"))
    out = tmp_path / "out.jsonl"
    first = run(tmp_path)
    kept = [entry for entry in first.entries if entry["custom_id"] != "b"]
    write(out, *kept)
    again = run(tmp_path)
    assert len(again.entries) == 4
    assert [entry["custom_id"] for entry in again.entries] == [*(entry["custom_id"] for entry in kept), "b"]


def test_the_header_holds_what_the_bytes_depend_on(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    run(tmp_path, settings=config(request__top_k=3))
    header = json.loads((tmp_path / "out.jsonl.job.json").read_text())
    assert header.keys() == {"input_sha256", "run_seed", "request", "settings", "system_fingerprint", "facts", "shard"}
    assert (header["run_seed"], header["request"], header["system_fingerprint"]) == (0, {"top_k": 3}, "fp_fake")


def test_the_input_is_known_again_whether_compressed_or_not(tmp_path: Path) -> None:
    plain = write(tmp_path / "in.jsonl", line("a"))
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    with ExitStack() as keep:
        assert scan(find_sources([str(plain)], keep)) == scan(find_sources([str(packed)], keep))
