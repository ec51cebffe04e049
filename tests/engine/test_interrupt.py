"""An interrupt is one line on stderr and status 130, whenever it comes."""

import pytest
from shared import python

# Python code that stands in for a module or a command while the interrupt comes.
RAISES = "os.kill(os.getpid(), signal.SIGINT); time.sleep(30)"
SWALLOWS = f"""
try:
    {RAISES}
except BaseException:
    pass
"""
MOMENTS = {
    # the module that is imported -> what its import does
    "at the first import": ("click", RAISES),
    "in an import that swallows it": ("click", f"{SWALLOWS}\ntime.sleep(30)"),
    "in an import that makes another error of it": (
        "click",
        f"{SWALLOWS}\nraise ImportError('cannot load')",
    ),
    "in an import of a command": ("memcalc.answers.layer", RAISES),
    "in one that says so itself": (
        "memcalc.answers.layer",
        f"{SWALLOWS}\nprint('Traceback', file=sys.stderr)\ntime.sleep(30)",
    ),
    "in a destructor": (
        "memcalc.answers.layer",
        f"class X:\n    def __del__(self):\n        {RAISES}\nX()\ntime.sleep(30)",
    ),
    "twice": ("memcalc.answers.layer", f"{SWALLOWS}\nos.kill(os.getpid(), signal.SIGINT)"),
}
FINDER = """
import os, signal, sys, time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

class Stand(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == {name!r} else None

    def exec_module(self, module):
        exec({code!r}, dict(os=os, signal=signal, sys=sys, time=time))

sys.meta_path.insert(0, Stand())
from memcalc.__main__ import main
sys.argv = ["memcalc", "layer", "22b"]
sys.exit(main())
"""


def run(code, tmp_path):
    """In a child that heeds interrupts, even if this process was started with them ignored."""
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return python("-c", heeds + code, cwd=tmp_path, timeout=25)


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_is_one_line_and_status_130(moment, tmp_path):
    name, code = MOMENTS[moment]
    done = run(FINDER.format(name=name, code=code), tmp_path)
    assert (done.returncode, done.stderr) == (130, "memcalc: interrupted\n")


COUNTED = """
import os, signal, sys
from memcalc.__main__ import main
calls = 0

def count(frame, event, argument):
    global calls
    calls += 1
    if calls == {moment}:
        os.kill(os.getpid(), signal.SIGINT)

sys.argv = ["memcalc", "ledger", "22b"]
sys.setprofile(count)
main()
sys.setprofile(None)
print("calls", calls)
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """How many functions a whole run calls: a clock that ticks the same each time."""
    done = run(COUNTED.format(moment=0), tmp_path_factory.mktemp("whole"))
    return int(done.stdout.split()[-1])


@pytest.mark.parametrize("percent", [1, 30, 60, 90])
def test_an_interrupt_of_a_running_command_is_one_line(calls, percent, tmp_path):
    done = run(COUNTED.format(moment=calls * percent // 100), tmp_path)
    assert (done.returncode, done.stderr) == (130, "memcalc: interrupted\n")


def test_an_ignored_interrupt_stays_ignored(tmp_path):
    """As of nohup, and of a shell's background jobs."""
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from memcalc.__main__ import main
from memcalc.cli import main as cli
answer = cli.main

def interrupted():
    os.kill(os.getpid(), signal.SIGINT)
    return answer()

cli.main = interrupted
sys.argv = ["memcalc", "gpus"]
sys.exit(main())
"""
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_that_is_being_written_is_not_left_half(tmp_path):
    (tmp_path / "x.csv").write_text("old")
    code = """
import os, signal, sys
from memcalc import files
from memcalc.__main__ import main
os.chmod = lambda *_: os.kill(os.getpid(), signal.SIGINT)
sys.argv = ["memcalc", "models", "-o", "x.csv"]
sys.exit(main())
"""
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (130, "memcalc: interrupted\n")
    assert [each.name for each in tmp_path.iterdir()] == ["x.csv"]
    assert (tmp_path / "x.csv").read_text() == "old"
