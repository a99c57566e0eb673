"""The `jaxkv` command: one small file per subcommand. Owns words, exit codes and messages; the work is done elsewhere."""
