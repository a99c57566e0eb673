"""Looking inside a running engine: observers, log lines, timelines, profiles. Changes nothing of what it looks at.

`observers` is what the engine tells its news to; `log`, `timeline` and `profile` are what listens.
"""
