"""Experiments: many runs out of one configuration, each in a folder of its own, and what can be said of them together.

`matrix` lists the runs, `live` makes one on the engine and `simulated` one on the simulator, `folder` keeps it on disk, `loop` makes what
is missing; `results` puts the figures into files and tables, `compare` into ratios, `plots` and `report` into pictures and a page; `rerun`
makes one again and says what differs.
"""
