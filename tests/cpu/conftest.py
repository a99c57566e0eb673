"""One compilation cache for all tests on the CPU, in pytest's own temporary folder: the second engine starts in a fraction of the time."""

import os
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache's folder; $JAXKV_TEST_CACHE keeps one across runs. Processes that tests start find it in their environment."""
    import jax

    folder = Path(os.environ.get("JAXKV_TEST_CACHE") or tmp_path_factory.mktemp("xla"))
    options = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in options.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    return folder


@pytest.fixture
def speaks_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints have a tokenizer of bytes, so that the tiny model has texts."""
    import jaxkv.startup
    from jaxkv.models import ByteTokenizer, load_checkpoint

    def load(*args: Any, **kwargs: Any) -> Any:
        checkpoint = load_checkpoint(*args, **kwargs)
        object.__setattr__(checkpoint, "tokenizer", ByteTokenizer())  # frozen, and its type is that of real tokenizers
        return checkpoint

    monkeypatch.setattr(jaxkv.startup, "load_checkpoint", load)
