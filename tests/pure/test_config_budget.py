"""The host budget: asked, defaulted, clamped, unlimited."""

import pytest

from jaxkv.config import available_memory_bytes, load_config, resolve_host_budget

MIB = 2**20


def budget(asked, available_mib):
    config = load_config({"model": {"path": "x"}, "scheduler": {"host_budget_mib": asked}})
    return resolve_host_budget(config, None if available_mib is None else available_mib * MIB)


@pytest.mark.parametrize(
    ("asked", "available_mib", "got_mib"),
    [
        ("auto", 32768, 8192),
        ("auto", 16384, 8192),
        ("auto", 1000, 500),
        ("auto", None, 8192),
        (0, 1000, 0),
        (500, 1000, 500),
        (501, None, 501),
    ],
)
def test_what_fits_is_taken_without_a_word(asked, available_mib, got_mib):
    assert budget(asked, available_mib) == (got_mib * MIB, None)


def test_null_is_no_limit():
    assert budget(None, 1000) == (None, None)


def test_a_larger_budget_is_clamped_and_says_so():
    bytes_, message = budget(4000, 1000)
    assert bytes_ == 500 * MIB
    assert message == "scheduler.host_budget_mib: 4000 is more than half of the available 1000 MiB, using 500; null sets no limit"


def test_available_memory_is_the_smaller_of_the_kernels_estimate_and_the_containers_rest(tmp_path):
    proc, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    assert available_memory_bytes(proc, cgroup) is None
    proc.write_text("MemTotal: 4096 kB\nMemAvailable:   2048 kB\n")
    assert available_memory_bytes(proc, cgroup) == 2 * MIB
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("0\n")
    assert available_memory_bytes(proc, cgroup) == 2 * MIB
    (cgroup / "memory.max").write_text(f"{3 * MIB}\n")
    (cgroup / "memory.current").write_text(f"{2 * MIB}\n")
    assert available_memory_bytes(proc, cgroup) == 1 * MIB
