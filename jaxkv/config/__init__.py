"""The description of one run: what can be set (`sections`), how it is read (`files`), put together and checked (`load`), shown (`show`),
what host memory it comes to (`budget`), what of it the scheduler is told (`scheduler`).

Knows nothing of models on disk, devices or requests.
"""

from jaxkv.config.budget import available_memory_bytes, resolve_host_budget
from jaxkv.config.load import load_config, split_overrides
from jaxkv.config.scheduler import num_draft, scheduler_config
from jaxkv.config.sections import Config

__all__ = ["Config", "available_memory_bytes", "load_config", "num_draft", "resolve_host_budget", "scheduler_config", "split_overrides"]
