"""The command line: help, dispatch, one line for what a user can mend, exit codes."""

import subprocess
import sys
import types

import pytest

from jaxkv import __version__
from jaxkv.cli import main as module
from jaxkv.cli.main import COMMANDS, main
from jaxkv.errors import JaxkvError


@pytest.fixture
def command(monkeypatch):
    """Put a function in the place of `jaxkv version`."""

    def put(run):
        fake = types.ModuleType("jaxkv.cli.version")
        fake.run = run
        monkeypatch.setitem(sys.modules, "jaxkv.cli.version", fake)

    return put


def raising(error):
    def run(words):
        raise error

    return run


def test_help_has_one_line_for_every_command(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, command in COMMANDS.items():
        assert f"  {name:<9} {command.summary}" in lines
    assert max(map(len, lines)) <= 100


def test_no_command_shows_the_help_and_fails(capsys):
    assert main([]) == 2
    assert "usage: jaxkv COMMAND" in capsys.readouterr().out


def test_version_is_one_line(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxkv {__version__}\n"


def test_the_version_command_lists_what_answers_depend_on(capsys):
    assert main(["version"]) == 0
    out = capsys.readouterr().out
    assert f"jaxkv {__version__}\n" in out and "\njaxlib " in out


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_a_help_of_its_own(capsys, name):
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"jaxkv {name}" in out and "{None}" not in out and " STR" not in out  # what a value is, in words of the command


@pytest.mark.parametrize("name", ["batch", "demo", "programs", "simulate", "calibrate"])
def test_the_help_of_a_command_with_a_configuration_lists_every_field(capsys, name):
    main([name, "--help"])
    out = capsys.readouterr().out
    assert "--scheduler.prefill-chunk  (integer >= 1; default: 64)" in out
    assert "--scheduler.host-budget-mib  (integer >= 0 | auto | null; default: auto)" in out
    assert "--server.allowed-hosts  (list of text; default: [])" in out and "--workload.priorities  (list of integer; default: [0])" in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["btch"], "jaxkv: error: unknown command 'btch', did you mean 'batch'?\n"),
        (
            ["zzz"],
            "jaxkv: error: unknown command 'zzz', there are demo, batch, serve, sweep, simulate, calibrate, workload, config, plan, fetch, "
            "convert, compare, report, rerun, programs, diff, version\n",
        ),
        (["fetch", "nope"], "jaxkv: error: no known model 'nope'; there are: smollm2\n"),
        (["demo", "none.yaml"], "jaxkv: error: cannot read the configuration none.yaml: No such file or directory\n"),
        (["demo", "--pool.page-sise", "3"], "jaxkv: error: unknown field 'pool.page_sise', nearest valid name: pool.page_size\n"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(capsys, words, line):
    assert main(words) == 2
    assert capsys.readouterr() == ("", line)


def test_a_flag_that_is_not_there_is_named(capsys):
    assert main(["diff", "a", "b", "--colour"]) == 2
    assert "--colour" in capsys.readouterr().err


def test_an_error_may_bring_its_own_exit_code(capsys, command):
    error = JaxkvError("some lines failed")
    error.exit_code = 3
    command(raising(error))
    assert main(["version"]) == 3
    assert capsys.readouterr().err == "jaxkv: error: some lines failed\n"


def test_a_models_error_is_one_line_too(capsys, command):
    pytest.importorskip("jaxkv.models.errors")
    from jaxkv.models.errors import ModelError

    command(raising(ModelError("tensor x is missing")))
    assert main(["version"]) == 2
    assert capsys.readouterr().err == "jaxkv: error: tensor x is missing\n"


def test_a_fault_of_our_own_keeps_its_traceback(command):
    command(raising(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError):
        main(["version"])


def test_a_traceback_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("JAXKV_TRACEBACK", "1")
    with pytest.raises(JaxkvError):
        main(["btch"])


def test_an_interrupt_is_exit_code_130_without_a_traceback(capsys, command):
    command(raising(KeyboardInterrupt()))
    assert main(["version"]) == 130
    assert capsys.readouterr().err == "jaxkv: interrupted\n"


def test_a_reader_that_leaves_is_no_error(tmp_path):
    script = tmp_path / "long.py"
    script.write_text(
        "import sys\nfrom jaxkv.cli import main\n"
        "main.COMMANDS |= {f'c{i}': main.COMMANDS['demo'] for i in range(9999)}\nsys.exit(main.main(['--help']))\n"
    )
    shell = f"{sys.executable} {script} | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (141, "usage: jaxkv COMMAND ...\n", "")


def test_python_dash_m_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "jaxkv", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"jaxkv {__version__}\n", "")


def test_the_exit_code_of_the_command_is_that_of_the_process(monkeypatch, command):
    command(lambda words: 3)
    monkeypatch.setattr(sys, "argv", ["jaxkv", "version"])
    with pytest.raises(SystemExit) as stop:
        module.console()
    assert stop.value.code == 3
