"""A plan's cost grows with the rows and not with the line: counted in calls, so that no clock and no neighbour has a say."""

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KEYS = {
    "benchmark", "command", "commit", "uncommitted_changes", "versions", "hardware", "rounds", "floor_us", "plan_us", "commit_us",
    "most_rows_over_fewest", "long_line_over_short",
}  # fmt: skip


@pytest.fixture(scope="module")
def scheduling() -> Any:
    """The benchmark's module."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import scheduling

        return scheduling
    finally:
        sys.path.remove(str(BENCHMARKS))


def num_calls(scheduling: Any, situation: str, rows: int, waiting: int) -> int:
    """Calls of one plan: of twenty the most, or of those that park one, the first."""
    job = scheduling.SITUATIONS[situation](rows, waiting)
    if situation == "park":
        return next(num for num, plan in (counted(job) for _ in range(1000)) if [note.kind for note in plan.notes] == ["park"])
    return max(counted(job)[0] for _ in range(20))


def counted(job: Any) -> tuple[int, Any]:
    """How many calls a turn's plan took, and the plan."""
    num, plan = 0, job.scheduler.plan

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    def profiled(*arguments: Any) -> Any:
        gc.disable()  # Hypothesis listens to it, which would count
        sys.setprofile(count)
        try:
            return plan(*arguments)
        finally:
            sys.setprofile(None)
            gc.enable()

    job.scheduler.plan = profiled
    made = job.turn()
    job.scheduler.plan = plan
    return num, made


@pytest.mark.parametrize("situation", ["steady", "blocked", "pass", "in_vain", "park"])
def test_four_times_the_rows_take_at_most_some_four_times_the_calls(scheduling: Any, situation: str) -> None:
    few, many = num_calls(scheduling, situation, 16, 64), num_calls(scheduling, situation, 64, 64)
    assert many < 4.6 * few, f"{few} calls with 16 rows, {many} with 64"


@pytest.mark.parametrize("situation", ["steady", "blocked", "pass", "in_vain", "park"])
def test_a_line_of_a_thousand_takes_the_calls_of_one_of_sixty(scheduling: Any, situation: str) -> None:
    assert num_calls(scheduling, situation, 16, 1000) == num_calls(scheduling, situation, 16, 60)


def test_the_benchmark_runs_without_jax_and_its_last_line_has_the_documented_keys() -> None:
    words = ["--rounds", "1", "--rows", "4,8", "--waiting", "8,16", "--plans", "3"]
    code = f"import runpy, sys; sys.argv = ['scheduling.py', *{words}]; sys.path.insert(0, {str(BENCHMARKS)!r}); "
    code += f"runpy.run_path({str(BENCHMARKS / 'scheduling.py')!r}, run_name='__main__'); assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == KEYS
    assert found["plan_us"].keys() == found["most_rows_over_fewest"].keys() == {"steady", "blocked", "pass", "in_vain", "park"}
    assert found["plan_us"]["steady"].keys() == {"4x8", "4x16", "8x8", "8x16"}
    readme = (BENCHMARKS / "README.md").read_text()
    assert [key for key in sorted(KEYS) if f"`{key}`" not in readme] == []


def test_sizes_that_make_no_sense_are_refused() -> None:
    done = subprocess.run([sys.executable, str(BENCHMARKS / "scheduling.py"), "--rows", "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "scheduling: error: --rounds, --plans and --waiting: allowed: 1 or more; --rows: 2 or more"
