"""Ctrl-C is remembered where Python drops it, and a second one ends the process at once."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from jaxkv.batch.interrupt import Interrupt
from jaxkv.cli import main as module
from jaxkv.cli.main import main
from jaxkv.interrupt import CtrlC, check_interrupt


def press() -> None:
    signal.raise_signal(signal.SIGINT)


class Dropped:
    """Pressed in here, Ctrl-C becomes an exception that Python drops."""

    def __del__(self) -> None:
        press()
        raise AssertionError("the handler did not raise")


def drop() -> None:
    Dropped()


def test_the_first_interrupt_is_raised_where_it_comes() -> None:
    with CtrlC() as ctrl_c, pytest.raises(KeyboardInterrupt):
        press()
    assert ctrl_c.is_noted


def test_one_that_python_drops_is_raised_at_the_next_check_and_told_nowhere() -> None:
    with CtrlC():
        check_interrupt()
        drop()
        with pytest.raises(KeyboardInterrupt):
            check_interrupt()
        with pytest.raises(KeyboardInterrupt):
            check_interrupt()
    check_interrupt()


def test_other_exceptions_that_python_drops_are_told_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: told.append(dropped.exc_type))

    class Faulty:
        def __del__(self) -> None:
            raise ZeroDivisionError

    with CtrlC():
        Faulty()
        drop()
    assert told == [ZeroDivisionError]


def test_all_is_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    with CtrlC():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with CtrlC() as ctrl_c:
            press()
            check_interrupt()
        assert not ctrl_c.is_noted
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_than_the_main_one_leaves_signals_alone() -> None:
    before, failed = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        try:
            with CtrlC():
                check_interrupt()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (failed, signal.getsignal(signal.SIGINT)) == ([], before)


def test_a_batch_job_that_begins_after_a_dropped_one_ends_at_once() -> None:
    with CtrlC():
        drop()
        with Interrupt() as interrupt:
            assert interrupt.signum == signal.SIGINT
    with CtrlC(), Interrupt() as interrupt:
        assert interrupt.signum is None


@pytest.mark.parametrize("ending", [lambda: 0, lambda: 1 // 0], ids=["done", "another error made of it"])
def test_a_command_that_goes_on_to_its_end_after_a_dropped_one_is_interrupted_all_the_same(
    ending, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stub:
        @staticmethod
        def run(words: list[str]) -> int:
            drop()
            return ending()

    monkeypatch.setattr(module.importlib, "import_module", lambda name: Stub)
    assert main(["version"]) == 130
    assert capsys.readouterr().err == "jaxkv: interrupted\n"


def pressed_twice(work: str) -> subprocess.CompletedProcess[str]:
    """A process that presses Ctrl-C itself, then works through `work`, in which it is pressed again."""
    source = (
        "import itertools, os, signal, subprocess, sys, time\n"
        "from jaxkv.interrupt import CtrlC\n"
        "ctrl_c = CtrlC().__enter__()\n"
        f"{work}\n"
        "print('went on')\n"
    )
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=60, env=dict(os.environ))


def test_a_second_one_ends_the_process_at_once() -> None:
    done = pressed_twice("try: signal.raise_signal(2)\nexcept KeyboardInterrupt: pass\nsignal.raise_signal(2)")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "jaxkv: interrupted twice\n")


@pytest.mark.skipif(sys.platform != "linux", reason="needs a C library that has System V's signal()")
def test_a_second_one_ends_it_also_while_no_python_code_runs() -> None:
    """As in a compilation: Python's own handler would have to wait for the end of the sum, which is hours away."""
    presses = "subprocess.Popen(['sh', '-c', f'sleep 0.5; kill -INT {os.getpid()}; sleep 0.5; kill -INT {os.getpid()}'])"
    done = pressed_twice(f"{presses}\nsum(itertools.repeat(0, 10**13))")
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "")
