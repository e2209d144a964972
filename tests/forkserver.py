"""Forks a process for each program of a test, after the imports that take two seconds. Started by ``running.py``.

Usage: ``forkserver.py [MODULE]``; the module is imported too.
Reads one JSON object a line from its standard input: ``arguments`` as those of ``python``, ``path``, ``environment``,
``cwd``, ``tear_down``, and the files ``stdout`` and ``stderr``. Answers with its process's id when it is ready; then
with that of each program's process at once, and its wait status at the end.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import sys
import types
import warnings

FILTERS = list(warnings.filters)
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what imports print is no answer
at_exit, status, tear_down = [], None, False  # no status: the program has not ended


@atexit.register  # before all that the packages register, so that it is called after that
def _last():
    for call in at_exit:
        call()
    if status is not None and not tear_down:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve():
    """Returns in each child, with its request; the server itself ends here with its standard input."""
    print(os.getpid(), file=ANSWERS, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            ANSWERS.close()
            os.setpgid(0, 0)
            return request
        with contextlib.suppress(OSError):  # it has done so itself
            os.setpgid(child, child)
        print(child, file=ANSWERS, flush=True)
        print(os.waitpid(child, 0)[1], file=ANSWERS, flush=True)
    os._exit(0)


def become(request):
    """Makes this process as like a new ``python`` as it can be; returns ``-c`` or ``-m``, and what follows."""
    null = os.open(os.devnull, os.O_RDONLY)
    files = [os.open(request[name], os.O_WRONLY | os.O_APPEND) for name in ("stdout", "stderr")]
    for number, descriptor in enumerate([null, *files]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the process's own
    random.seed()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    warnings.filters[:] = FILTERS
    arguments = request["arguments"]
    while arguments[0] == "-W":
        sys.warnoptions.append(arguments[1])
        warnings.simplefilter(arguments[1])
        del arguments[:2]
    sys.path[:0] = ["", *request["path"]]
    sys.argv = [arguments[0], *arguments[2:]]
    return arguments[:2]


gc.disable()  # it would look through modules again and again
for module in ("torch", "deepspeed", "transfer.nvme", "transfer.zero3", "accelerators.simulated", *sys.argv[1:]):
    importlib.import_module(module)
gc.collect()
gc.freeze()  # so that a collection in a child copies no pages
gc.enable()
asked = serve()
kind, program = become(asked)
tear_down = asked["tear_down"]
main = sys.modules["__main__"] = types.ModuleType("__main__")
main.at_exit = at_exit  # type: ignore[attr-defined]
# At the top, so that the process ends as a program does: tracebacks, threads, atexit, finalizers.
try:
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(compile(program, "<string>", "exec"), vars(main))
    status = 0
except SystemExit as end:
    status = end.code if isinstance(end.code, int) else int(end.code is not None)
    raise
except BaseException:
    status = 1
    raise
