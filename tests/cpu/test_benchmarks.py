"""Every benchmark runs from end to end with the small fixture, and its last line is the JSON that benchmarks/README.md describes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cpu import tiny

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
HEADER = {"benchmark", "command", "commit", "uncommitted_changes", "versions", "hardware", "model", "dtype", "rounds"}
SMALL_PROMPTS = ["--prompt", "8", "--answer", "8"]
STALL = ["--victim", "20", "--chat", "4", "--parks", "1", "--quiet-steps", "2", "--natural-steps", "30", "--copies", "2"]
FIXED = [
    *("--workload.lengths", "fixed", "--workload.num_requests", "3", "--workload.prompt_len_min", "40", "--workload.prompt_len_max", "40"),
    *("--workload.answer_len_min", "40", "--workload.answer_len_max", "40"),
]
RUNS: dict[str, tuple[list[str], set[str]]] = {
    "accuracy": (["--tokens", "20", "--other-chunk", "4"], {"tokens", "variants"}),
    "decode": (
        ["--rows", "2", "--contexts", "8,16", "--step-context", "16", "--long", "40", "--short", "8", "--repeats", "2"],
        {"weight_mb", "bandwidth_gb_s", "bandwidth_floor_ms", "rows", "pool_ms", "pool_large_over_small", "lengths", "lengths_ms"},
    ),
    "prefill": (
        ["--chunks", "8,16", "--prompt", "40", "--chats", "2", "--chat-prompt", "4", "--quiet-steps", "2"],
        {"prompt_tokens", "chats", "chunks"},
    ),
    "pressure": (
        SMALL_PROMPTS,
        {
            "requests", "prompt_tokens", "answer_tokens", "demand_tokens", "pools",
            "armed_over_huge", "armed_num_parks", "runs", "runs_with_equal_bytes",
        },
    ),
    "policies": (
        ["--chats", "3", "--shortest", "6", "--longest", "24", "--prompt", "8", "--apart", "0.2"],
        {"chats", "answer_tokens", "prompt_tokens", "pool_tokens", "equal_runs", "loads"},
    ),
    "keep": (
        ["--prompt", "20", "--answer", "60", "--demand", "2", "--transfer.chunk_pages", "2"],
        {
            "chats", "prompt_tokens", "answer_tokens", "pool_tokens", "chunk_mib", "images", "bytes_saved", "park_time_saved",
            "runs", "runs_with_equal_bytes",
        },
    ),
    "overlap": (["--rows", "2", "--prompt", "4", "--steps", "3"], {"prompt_tokens", "rows"}),
    "speculate": (
        ["--rows", "2", "--tokens", "12", "--kind", "draft", "--speculate.draft_path", str(tiny.LLAMA), "--model.max_len", "512"],
        {"kind", "num_draft", "rows"},
    ),
    "stall": (STALL, {"victim_tokens", "victim_mb", "bystanders", "gaps_ms", "copies"}),
    "startup": (["--prompt", "4"], {"format", "starts_s", "cold_over", "cold_over_processor"}),
    "serve": (
        ["--model.path", "smollm2", "--model.max_len", "80", "--pool.tokens", "120", "--apart", "1", *FIXED],
        {"requests", "chat", "demand_tokens", "pool_tokens", "workload", "loads"},
    ),
}  # fmt: skip

COMPILE_MUCH = {"accuracy", "decode", "pressure", "speculate", "startup", "serve"}  # for several sizes of pool, or without a cache


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({**tiny.SECTIONS, "scheduler": {**tiny.SECTIONS["scheduler"], "rows": 3}}))
    return path


def run(name: str, config: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_NUMPY")}
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), str(config), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def results(name: str, config: Path, *words: str) -> dict[str, Any]:
    done = run(name, config, "--rounds", "1", *words)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in COMPILE_MUCH else ()) for name in RUNS])
def test_it_runs_from_end_to_end_and_its_last_line_has_the_documented_keys(name: str, config: Path) -> None:
    words, keys = RUNS[name]
    found = results(name, config, *words)
    assert found.keys() == HEADER | keys
    assert found["benchmark"] == name
    assert found["rounds"] == 1
    assert found["hardware"]["devices"] == ["cpu:0 cpu"]
    CHECKS.get(name, lambda found: None)(found)


def check_accuracy(found: dict[str, Any]) -> None:
    variants = found["variants"]
    assert found["tokens"] == 20
    assert variants["float32"]["kl"] == 0
    assert abs(variants["float32_other_chunks"]["kl_max"]) < 1e-6 < variants["float32_kv_int8"]["kl_max"]
    assert variants["float32_kv_int8"]["kv_bytes_per_token"] == 3 * 2 * 2 * (16 + 4)
    assert len(variants) == 14


def check_pressure(found: dict[str, Any]) -> None:
    assert found["runs"] == found["runs_with_equal_bytes"] == 6
    assert found["armed_num_parks"] == 0
    assert found["pools"]["2x"]["num_parks"] > 0
    assert found["pools"]["2x"]["pool_use_at_park"] > 0.5


def check_keep(found: dict[str, Any]) -> None:
    kept, not_kept = found["images"]["kept"], found["images"]["not_kept"]
    assert found["runs"] == found["runs_with_equal_bytes"] == 2
    assert kept["kept_bytes_saved"] > 0 == not_kept["kept_bytes_saved"]
    assert kept["bytes_to_host"] < not_kept["bytes_to_host"]


def check_stall(found: dict[str, Any]) -> None:
    assert set(found["gaps_ms"]) == {"direct", "staged", "staged_blocking", "hold", "hold_blocking"}
    for gaps in found["gaps_ms"].values():
        assert gaps["none"]["num_parks"] == 0
        assert gaps["forced_contiguous"]["num_parks"] == gaps["forced_scattered"]["num_parks"] == 1
        assert gaps["natural"]["num_parks"] > 0


def check_startup(found: dict[str, Any]) -> None:
    for stages in found["starts_s"].values():
        total, processor = (stages.pop(name)["median"] for name in ("total", "processor"))
        assert processor > 0
        assert sum(stage["median"] for stage in stages.values()) == pytest.approx(total, abs=0.02)


def check_policies(found: dict[str, Any]) -> None:
    assert found["equal_runs"] == {"eight": "5 of 5", "four_rows": "5 of 5", "apart": "5 of 5"}
    assert found["loads"]["eight"]["policies"]["smallest head"]["num_parks"] > 0
    assert found["loads"]["eight"]["policies"]["reserve"]["num_parks"] == 0
    assert found["loads"]["apart"]["policies"]["smallest head"]["simulated_s"]["median"] >= 0.4  # the last chat comes then


def check_serve(found: dict[str, Any]) -> None:
    for load in found["loads"].values():
        assert load["completed"] == load["identical"] == "3 of 3" and load["errors"] == []
        assert load["no_gap_over_2_s"] == (load["longest_gap_s"] <= 2)
    ample, tight = found["loads"]["ample"], found["loads"]["tight"]
    assert tight["parks"]["median"] > 0 == ample["parks"]["median"]
    assert tight["decode_steps"] >= tight["bound_steps"] and ample["bound_steps"] == 39
    assert 0 <= tight["park_cost"]["share"] < 1 and ample["park_cost"]["more_steps"] == 0
    assert (found["demand_tokens"], found["pool_tokens"]) == (240, 120)


CHECKS = {
    "accuracy": check_accuracy,
    "keep": check_keep,
    "policies": check_policies,
    "pressure": check_pressure,
    "serve": check_serve,
    "stall": check_stall,
    "startup": check_startup,
}


@pytest.mark.parametrize("name", [*RUNS, "peers"])
def test_every_key_is_described(name: str) -> None:
    readme = (BENCHMARKS / "README.md").read_text()
    keys = RUNS[name][1] if name in RUNS else PEERS
    assert [key for key in sorted(HEADER | keys) if f"`{key}`" not in readme] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--workload.cancels", "0.5"),
            "workload: whole answers of one choice each are compared here; set cancels to 0 and choices to [1]",
        ),
        (("--pool.tokens", "240", *FIXED), "pool.tokens: got 240, and the load takes 240 at most: set fewer, so that it does not fit"),
        (
            ("--chat", "1", "--model.max_len", "null", *FIXED),
            "model.max_len: is null, and a chat may then take any number of tokens; set it",
        ),
    ],
)
def test_a_load_that_cannot_be_compared_is_refused_before_a_server_starts(config: Path, words: tuple[str, ...], said: str) -> None:
    done = run("serve", config, *words)
    assert (done.returncode, done.stderr) == (2, f"serve: error: {said}\n")


def test_a_wrong_field_is_one_line_and_exit_code_2(config: Path) -> None:
    done = run("decode", config, "--pool.tokns", "3")
    assert done.returncode == 2
    assert done.stderr == "decode: error: unknown field 'pool.tokns', nearest valid name: pool.tokens\n"


PEERS = {
    "requests", "prompt_tokens", "answer_tokens", "pool_tokens", "tokens_per_s", "equal_to_alone", "jaxkv_over_transformers",
    "jaxkv_over_transformers_less_call", "transformers_call_s", "tight_over_transformers", "jaxkv_num_parks", "does_not_run",
    "same_first_tokens", "attention", "whole", "jaxkv_over_llama_cpp", "llama_cpp_errors",
}  # fmt: skip


SMALL_WORKLOAD = [
    *("--workload.lengths", "fixed", "--workload.num_requests", "3", "--workload.prompt_len_min", "8", "--workload.prompt_len_max", "8"),
    *("--workload.answer_len_min", "8", "--workload.answer_len_max", "8"),
]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is not None, reason="the extra peers is installed")
def test_peers_names_the_extra_it_needs(config: Path) -> None:
    done = run("peers", config)
    assert done.returncode == 2
    assert done.stderr == "peers: error: this needs the package transformers, which is not installed: pip install 'jaxkv[peers]'\n"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra peers")
def test_the_peer_gives_the_same_first_tokens(config: Path) -> None:
    found = results("peers", config, *SMALL_WORKLOAD)
    assert found.keys() == HEADER | PEERS
    assert found["same_first_tokens"] == found["requests"]
    assert found["equal_to_alone"]["jaxkv tight"] == "3 of 3"
