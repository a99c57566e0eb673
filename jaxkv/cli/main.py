"""Finds the subcommand, runs it, and turns what goes wrong into one line and an exit code. Knows no subcommand's arguments.

Exit codes: 0 done, 2 something to correct, 3 a batch job in which some lines failed, 130 interrupted.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from jaxkv import __version__
from jaxkv.config.fields import nearest
from jaxkv.errors import JaxkvError
from jaxkv.interrupt import EXIT_INTERRUPTED, CtrlC


@dataclass(frozen=True, slots=True)
class Command:
    """One line of the help; the module of the same name in jaxkv.cli has `run(words) -> exit code`."""

    group: str
    summary: str


COMMANDS = {
    "demo": Command("Run", "eight chats through a pool that is too small, live"),
    "batch": Command("Run", "a file of requests in, a file of answers out (OpenAI batch format)"),
    "serve": Command("Run", "an HTTP server with OpenAI's endpoints"),
    "sweep": Command("Experiments", "many runs of one configuration, on the engine or simulated, and their results"),
    "simulate": Command("Experiments", "a load against the scheduler alone, on a simulated clock: policies compared"),
    "calibrate": Command("Experiments", "what a step and a copy take on this machine, for `simulate`"),
    "workload": Command("Experiments", "a configuration's load as a batch file and as a trace, for any engine"),
    "config": Command("Experiments", "a configuration as it is resolved, checked, or as a schema for editors"),
    "plan": Command("Models", "what a model, its pool and a park take, from its config.json alone"),
    "fetch": Command("Models", "download a known model into the cache folder"),
    "convert": Command("Models", "write a checkpoint that loads faster"),
    "compare": Command("Results", "ratios between two sides of a sweep, and whether they are more than noise"),
    "report": Command("Results", "plots of a sweep, and one page with everything"),
    "rerun": Command("Results", "a run of a sweep once more, and whether the same came out"),
    "programs": Command("Results", "what is compiled for a configuration, and what each program takes"),
    "diff": Command("Results", "compare the answers of two batch jobs, token by token"),
    "version": Command("Results", "versions of jaxkv and what it runs on"),
}


def console() -> None:
    """The entry point of the `jaxkv` script."""
    code = main(sys.argv[1:])
    if code > 128 and "jax" in sys.modules:
        # Interrupted while XLA compiles, Python's own way out ends in a segmentation fault, and the exit code with it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(words: Sequence[str]) -> int:
    """Run one command line; return its exit code."""
    with CtrlC() as ctrl_c:
        try:
            code = _dispatch(list(words))
            sys.stdout.flush()
            if code != EXIT_INTERRUPTED:  # else it is told already
                ctrl_c.check()
            return code
        except BaseException as error:
            return _code_of(error, ctrl_c)


def _code_of(error: BaseException, ctrl_c: CtrlC) -> int:
    """The exit code for what a command raised, with a line about it; a fault of our own is raised again."""
    if isinstance(error, KeyboardInterrupt) or ctrl_c.is_noted:  # XLA may have made another error of it
        print("jaxkv: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    if isinstance(error, SystemExit):  # tyro: 0 after help, 2 after a line about what it could not read
        return error.code if isinstance(error.code, int) else 2
    if isinstance(error, BrokenPipeError):
        return _reader_left()
    if not _is_for_a_person(error) or os.environ.get("JAXKV_TRACEBACK") == "1":
        raise error
    print(f"jaxkv: error: {error}", file=sys.stderr)
    return getattr(error, "exit_code", 2)


def help_text() -> str:
    """What `jaxkv --help` prints: every command on a line, by group."""
    lines = ["usage: jaxkv COMMAND ...", "", "An inference engine that parks what does not fit."]
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines += ["", f"{group}:"]
        lines += [f"  {name:<9} {command.summary}" for name, command in COMMANDS.items() if command.group == group]
    return "\n".join([*lines, "", "`jaxkv COMMAND --help` shows the arguments of one. `jaxkv --version` prints the version."])


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"jaxkv {__version__}")
        return 0
    name, *rest = words
    if name not in COMMANDS:
        best = nearest(name, COMMANDS)
        raise JaxkvError(f"unknown command {name!r}, " + (f"did you mean {best!r}?" if best else f"there are {', '.join(COMMANDS)}"))
    return int(importlib.import_module(f"jaxkv.cli.{name}").run(rest))


def _is_for_a_person(error: BaseException) -> bool:
    """Whether the message alone says enough: our own errors, and those of the models if they have been loaded."""
    errors = sys.modules.get("jaxkv.models.errors")
    return isinstance(error, JaxkvError) or (errors is not None and isinstance(error, errors.ModelError))


def _reader_left() -> int:
    """`jaxkv ... | head` closed the pipe: be quiet, also when Python flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141
