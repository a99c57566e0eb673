"""`python -m jaxkv` is the `jaxkv` command."""

from jaxkv.cli.main import console

console()
