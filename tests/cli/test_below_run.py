"""Processes below ``h2d run``: which are reached, when, and at what cost.

Most programs here import a ``deepspeed`` and a ``transfer`` of a few lines, which need no torch. Theirs says
``served`` once ``transfer.zero3.install`` was called.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.running import ROOT, run_python

DEEPSPEED = """
served = False
def initialize():
    return "an engine"
"""
ZERO3 = """
import os, sys
def install():
    if "REFUSE" in os.environ:
        raise ValueError("h2d.yaml:1: strategi: unknown key\\nh2d.yaml:2: another")
    sys.modules["deepspeed"].served = True
"""
SUMMARY = """
engines = []
def speak(say, tell):
    global said, told
    said, told = say, tell
def engine():
    engines.append(1)
    told()
def end():
    if engines:
        said("served")
    return bool(engines)
"""


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


@pytest.fixture
def packages(tmp_path):
    """The folder of a ``deepspeed`` and a ``transfer`` without torch."""
    files = {"deepspeed/__init__.py": DEEPSPEED, "transfer/__init__.py": "", "transfer/zero3/__init__.py": ZERO3}
    return write(tmp_path / "packages", {**files, "transfer/zero3/summary.py": SUMMARY})


@pytest.fixture(scope="module")
def exports():
    """What ``h2d run --print-env`` prints."""
    done = run_python("-m", "transfer.cli", "run", "--print-env", forked=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def variables(exports, path):
    """The environment of a shell that has evaluated the exports; ``path`` is PYTHONPATH's end, or all of it."""
    bootstrap = re.search("^export PYTHONPATH='?([^:'\n]*)", exports, re.MULTILINE)[1]
    return {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(map(str, [bootstrap, *path])), "H2D_RUN": "env"}


def python(*arguments, env, executable=sys.executable):
    """Runs a Python away from this project's folder, which ``-c`` would put before everything."""
    command = [executable, *map(str, arguments)]
    return subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=120, check=False)


def as_command(arguments, packages, **environment):
    """``h2d run`` with the small packages below it."""
    environment = {"PATH": os.environ["PATH"], **environment}
    command = ("-m", "transfer.cli", "run", *arguments)
    return run_python(*command, path=[packages], environment=environment, cwd="/", forked=True)


def test_a_process_without_deepspeed_pays_little_and_imports_nothing_else(exports):
    show = "import sys; print(sorted(sys.modules))"
    seconds = []
    for _ in range(5):
        done = python("-X", "importtime", "-c", show, env=variables(exports, []))
        # The last line of this name is the whole of it; those before are the look for a hidden one.
        times = re.findall(r"\|\s+(\d+) \|\s+sitecustomize$", done.stderr, re.MULTILINE)
        seconds.append(int(times[-1]) / 1e6)
    assert 0 < min(seconds) < 0.005
    bare = eval(python("-c", show, env={}).stdout)
    assert set(eval(done.stdout)) - set(bare) <= {"sitecustomize", "atexit"}


def test_every_process_of_a_script_is_reached_and_knows_its_classes(packages, tmp_path):
    script = """
    import atexit, multiprocessing, os, subprocess, sys, threading, time
    class Item:
        pass
    def work(queue):
        import deepspeed
        queue.put((Item(), deepspeed.served))
    def late():
        time.sleep(0.2)
        print("thread", Item.__module__, flush=True)
    if __name__ == "__main__":
        for method in ("spawn", "fork", "forkserver"):
            context = multiprocessing.get_context(method)
            queue = context.Queue()
            process = context.Process(target=work, args=(queue,))
            process.start()
            item, served = queue.get(timeout=60)
            process.join()
            print(method, isinstance(item, Item), served, flush=True)
        import deepspeed
        print("main", deepspeed.served, type(deepspeed.__loader__).__name__, *vars(deepspeed.__loader__), flush=True)
        program = "import deepspeed; print('child', deepspeed.served)"
        subprocess.run([sys.executable, "-c", program], check=True)
        program = f"import sys; sys.path.insert(0, {os.path.dirname(deepspeed.__path__[0])!r}); {program}"
        subprocess.run([sys.executable, "-I", "-c", program], check=True)
        threading.Thread(target=late).start()
        atexit.register(lambda: print("exit handler", Item, flush=True))
        sys.exit(7)
    """
    path = write(tmp_path, {"train.py": script}) / "train.py"
    done = as_command([path], packages)
    assert done.stdout.splitlines() == [
        "spawn True True",
        "fork True True",
        "forkserver True True",
        "main True SourceFileLoader name path",
        "child True",
        "child False",  # Python's -I ignores PYTHONPATH
        "thread __main__",
        "exit handler <class '__main__.Item'>",
    ]
    assert done.stderr == "h2d run: no ZeRO-3 engine was made\n"
    assert done.returncode == 7


def test_processes_that_are_not_below_it_are_left_alone(packages):
    done = python("-c", "import deepspeed; print(deepspeed.served)", env={"PYTHONPATH": str(packages)})
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.slow
def test_workers_of_pytest_are_reached(packages, tmp_path):
    test = """
    import os
    import pytest
    @pytest.mark.parametrize("number", range(2))
    def test_it(number):
        import deepspeed
        assert deepspeed.served and os.environ["PYTEST_XDIST_WORKER"]
    """
    write(tmp_path / "tests", {"test_it.py": test})
    options = ("-q", "-n2", "-p", "xdist", "-p", "no:cacheprovider", f"--rootdir={tmp_path}")
    done = as_command(["-m", "pytest", *options, tmp_path / "tests"], packages, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.mark.parametrize("place", ["the module path", "site-packages"])
def test_a_sitecustomize_that_was_there_runs_as_before(exports, tmp_path, place):
    files = {"sitecustomize.py": "import sys\nprint('theirs', __name__, __file__)\nMARK = 1\n"}
    executable, path = sys.executable, []
    if place == "site-packages":
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=120)
        (folder,) = (tmp_path / "venv").glob("lib/python*/site-packages")
        executable = str(tmp_path / "venv/bin/python")
        if (
            subprocess.run(
                [executable, "-I", "-c", "import sitecustomize"], capture_output=True, check=False
            ).returncode
            == 0
        ):
            pytest.skip("The system's Python has a sitecustomize of its own, which comes before site-packages.")
    else:
        folder = tmp_path / "theirs"
        path = [folder]
    write(folder, files)
    show = ("-c", "import sitecustomize, sys; print(sitecustomize.MARK, sys.path[1:])")
    before = python(*show, env={"PYTHONPATH": ":".join(map(str, path))}, executable=executable)
    below = python(*show, env=variables(exports, path), executable=executable)
    assert "theirs sitecustomize" in before.stdout
    assert (below.returncode, below.stdout, below.stderr) == (0, before.stdout, before.stderr)


def test_errors_of_that_one_are_reported_as_before_and_deepspeed_is_served(exports, packages, tmp_path):
    write(tmp_path / "theirs", {"sitecustomize.py": "import not_there\n"})
    path = [tmp_path / "theirs", packages]
    show = ("-c", "import deepspeed; print(deepspeed.served)")
    before = python(*show, env={"PYTHONPATH": ":".join(map(str, path))})
    below = python(*show, env=variables(exports, path))
    assert "No module named 'not_there'" in before.stderr
    assert (below.returncode, below.stdout, below.stderr) == (0, "True\n", before.stderr)


def test_a_usercustomize_runs_as_before(exports, tmp_path):
    base = getattr(sys, "_base_executable", sys.executable)  # a virtual environment has no user's site
    write(tmp_path, {"usercustomize.py": "print('user')\n"})
    before = python("-c", "pass", env={"PYTHONPATH": str(tmp_path)}, executable=base)
    below = python("-c", "pass", env=variables(exports, [tmp_path]), executable=base)
    assert (before.stdout, below.stdout, below.stderr) == ("user\n", "user\n", "")


ASK = """
import deepspeed
print("goes on", flush=True)
print(deepspeed.initialize())
"""


def test_a_broken_configuration_is_said_once_and_lets_no_engine_be_made(exports, packages):
    env = {**variables(exports, [packages]), "REFUSE": "1"}
    done = python("-c", ASK, env=env)
    assert done.returncode == 1
    assert done.stdout == "goes on\n"
    said = "h2d run: ZeRO-3 cannot be served: h2d.yaml:1: strategi: unknown key; h2d.yaml:2: another"
    assert done.stderr.splitlines()[0] == said
    assert done.stderr.splitlines()[-1] == f"RuntimeError: {said}"
    other = python("-c", ASK, env={**env, "RANK": "1"})
    assert not other.stderr.startswith("h2d run: "), "one rank speaks"
    assert other.returncode == 1


def test_a_transfer_of_somebody_else_on_the_path_is_named(exports, packages):
    shutil.rmtree(packages / "transfer/zero3")
    done = python("-c", ASK, env=variables(exports, [packages]))
    assert done.returncode == 1
    assert str(packages / "transfer") in done.stderr.splitlines()[0]


def test_an_environment_that_was_lost_on_the_way_is_named(exports, packages):
    env = {name: value for name, value in variables(exports, [packages]).items() if name != "H2D_RUN"}
    done = python("-c", "import deepspeed; print(deepspeed.served)", env=env)
    assert done.stdout == "True\n"
    assert "H2D_RUN has not" in done.stderr


ENGINE = "import deepspeed; from transfer.zero3 import summary; summary.engine()"
STARTS = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}], check=True)"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("pass", "no ZeRO-3 engine was made"),
        ("import deepspeed", "no ZeRO-3 engine was made"),
        (ENGINE, "served"),
        (STARTS.format(ENGINE), "served"),  # as a launcher does: the rank has said it
        (STARTS.format("import deepspeed"), "no ZeRO-3 engine was made"),
        ("import os\nif os.fork() == 0: raise SystemExit\nos.wait()", "no ZeRO-3 engine was made"),
    ],
)
def test_one_line_at_the_end(packages, tmp_path, program, said):
    path = write(tmp_path, {"program.py": program}) / "program.py"
    done = as_command([path], packages)
    assert (done.returncode, done.stderr) == (0, f"h2d run: {said}\n")


def test_below_the_exports_the_first_rank_says_that_there_was_nothing(exports, packages):
    env = variables(exports, [packages])
    programs = {"import deepspeed": {"RANK": "0"}, "import deepspeed ": {"RANK": "1"}, "pass": {"RANK": "0"}}
    said = [python("-c", program, env={**env, **rank}).stderr for program, rank in programs.items()]
    assert said == ["h2d run: no ZeRO-3 engine was made\n", "", ""]


RANK = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
time.sleep(100)
"""


def ends_with_its_ranks(started, folder, number):
    """Ends a command by SIGTERM, as soon as its ranks are there; all of them have ended soon after it."""
    deadline = time.monotonic() + 120
    try:
        while len(list(folder.iterdir())) < number:
            assert started.poll() is None, started.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        started.send_signal(signal.SIGTERM)
        started.wait(timeout=60)
        left = {int(path.name) for path in folder.iterdir()}
        for _ in range(100):
            left = {each for each in left if is_alive(each)}
            if not left:
                break
            time.sleep(0.1)
        assert not left
    finally:
        started.kill()
        started.communicate()
        for path in folder.iterdir():
            if is_alive(int(path.name)):
                os.kill(int(path.name), signal.SIGKILL)


def is_alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


LAUNCHER = """#!{python}
import subprocess, sys
started = subprocess.Popen([sys.executable, *sys.argv[1:]])
sys.exit(started.wait())
"""


@pytest.fixture
def pids(tmp_path):
    """Where each rank leaves its process's id."""
    (tmp_path / "pids").mkdir()
    return tmp_path / "pids"


def start(pids, *arguments, path=""):
    """Starts ``h2d run`` with these arguments and a rank's in a process of its own."""
    rank = write(pids.parent, {"rank.py": RANK}) / "rank.py"
    return subprocess.Popen(
        [sys.executable, "-m", "transfer.cli", "run", *map(str, arguments), str(rank), str(pids)],
        env={"PYTHONPATH": ":".join([str(ROOT), *sys.path]), "PATH": f"{path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd=pids.parent,
    )


@pytest.mark.slow
def test_sigterm_ends_the_ranks_of_a_launcher_that_would_leave_them(pids, tmp_path):
    launcher = write(tmp_path / "bin", {"deepspeed": LAUNCHER.format(python=sys.executable)}) / "deepspeed"
    launcher.chmod(0o755)
    ends_with_its_ranks(start(pids, "deepspeed", path=launcher.parent), pids, 1)


@pytest.mark.slow
def test_sigterm_ends_the_ranks_of_torchrun(pids):
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    ends_with_its_ranks(start(pids, *command), pids, 2)


@pytest.mark.slow
def test_a_real_training_says_what_it_was_served_with():
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    script = (ROOT / "examples/train_zero3.py", "--simulate", "--steps", "2")
    done = run_python("-m", "transfer.cli", "run", *script, environment=environment, forked=True)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("h2d run: ")]
    copies = re.search(r"in 2 steps, (\d+) copies$", done.stdout, re.MULTILINE)[1]
    assert len(said) == 2
    assert "sub-groups of a ZeRO-3 engine" in said[0]
    assert said[1].startswith(f"h2d run: {copies} copies (")
    assert re.search(r"served (\d+) of \1 copy-backs$", said[1])
