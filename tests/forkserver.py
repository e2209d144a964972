"""Forks a process for each program of a test, after the imports that take two seconds. Started by ``running.py``.

Reads one JSON object a line from its standard input: ``arguments`` as those of ``python``, ``path``, ``environment``,
``cwd``, and the files ``stdout`` and ``stderr``. Answers with the process's id at once, and its wait status at the end.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import sys
import types
import warnings

FILTERS = list(warnings.filters)
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what imports print is no answer


def serve():
    """Returns in each child, with its request; the server itself ends here when nobody asks any more."""
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
        _, status = os.waitpid(child, 0)
        print(status, file=ANSWERS, flush=True)
    os._exit(0)


def become(request):
    """Makes this process as like a new ``python`` as it can be; returns its program and where that is from."""
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
    if arguments[0] != "-c":
        raise ValueError(f"a forked process runs -W ... and -c ..., not {arguments}")
    sys.path[:0] = ["", *request["path"]]
    sys.argv = ["-c", *arguments[2:]]
    return arguments[1]


for module in ("torch", "deepspeed", "transfer.nvme", "transfer.zero3", "accelerators.simulated"):
    importlib.import_module(module)
gc.collect()
gc.freeze()  # so that a collection in a child copies no pages
program = become(serve())
main = sys.modules["__main__"] = types.ModuleType("__main__")
# At the top, so that the process ends as a program does: tracebacks, atexit, threads, finalizers.
exec(compile(program, "<string>", "exec"), vars(main))
