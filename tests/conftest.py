"""What all tests share: a strict JAX on the CPU, marks by folder, the real weights where they are, Python in a process of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

ON_ACCELERATOR = os.environ.get("JAXKV_ACCELERATOR") == "1"

# Before anything imports JAX. A mix of dtypes or a silent broadcast is an error in our own code.
if not ON_ACCELERATOR:
    os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")

# A shell starts what runs in the background with interrupts ignored, and so would be those that tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("jaxkv", deadline=None)
settings.load_profile("jaxkv")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in tests/accelerator, and skip what needs a device or weights that are not there."""
    from jaxkv.fetch import cache_folder, known_path
    from tests.webdriver import missing

    no_browser, no_weights = missing(), known_path("smollm2", cache_folder(None)) is None
    for item in items:
        if "accelerator" in item.path.parts[:-1]:
            item.add_marker("accelerator")
        if item.get_closest_marker("accelerator") and not _has_accelerator():
            item.add_marker(pytest.mark.skip(reason="needs a GPU or TPU and JAXKV_ACCELERATOR=1: make test-accelerator"))
        if item.get_closest_marker("weights") and no_weights:
            item.add_marker(pytest.mark.skip(reason="needs real weights: jaxkv fetch smollm2"))
        if item.get_closest_marker("browser") and no_browser:
            item.add_marker(pytest.mark.skip(reason=no_browser))


def _has_accelerator() -> bool:
    if not ON_ACCELERATOR:
        return False
    import jax

    return jax.default_backend() != "cpu"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The SmolLM2 GGUF in the cache folder; use it in tests marked `weights`."""
    from jaxkv.fetch import cache_folder, known_path

    path = known_path("smollm2", cache_folder(None))
    if path is None:
        pytest.skip("needs real weights: jaxkv fetch smollm2")
    return path


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Run Python source in a process of its own, where asked with several forced CPU devices; return what it printed."""

    def run(source: str, devices: int = 1, cwd: Path | None = None) -> str:
        env = dict(os.environ)
        if devices > 1:
            env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
            env["NPROC"] = str(2 * devices)  # with fewer threads than that XLA's CPU collectives can wait for each other for ever
        done = subprocess.run([sys.executable, "-c", source], env=env, cwd=cwd, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
