"""Real ZeRO-3 on one rank, whose optimizer state passes from files through each step, and what fails on the way.

Usage: ``interrupted.py CASE``. Ends with status 0 where what is promised holds.
"""

import contextlib
import errno
import os
import shutil
import threading
from pathlib import Path

import deepspeed
import pytest
import torch

from tests.zero3.gradients.training import DIRECT, LAYERS, WIDTH, Run
from tests.zero3.launching import main_of
from transfer import SwapError, zero3
from transfer.errors import TransferError
from transfer.zero3.attachments import attachments
from transfer.zero3.swapped import file_stream, scratch, state_file
from transfer.zero3.swapped.file_stream import FileStream

state_file._RETRIES = (0.0,)
file_stream.SLOTS = 4
#: One sub-group. Of smaller ones, which stay in memory, DeepSpeed's checkpoints of files restore nothing.
ALL_IN_FILES = {"sub_group": 10**9}
runs = 0


def start(*, attached=True, resident=None, **case):
    """A training of its own; ``resident``: how much of its state stays in host memory."""
    global runs
    runs += 1
    if resident is not None:
        case["transfer"] = {**DIRECT, "zero3": {"host_memory": resident}}
    return Run({"nvme": True, "name": f"interrupted-{runs}", **case}, attached, runs)


def iterate(run, *seeds, used=range(LAYERS)):
    for seed in seeds:
        batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()
        run.engine.backward(run.engine(batch, used).float().pow(2).mean())
        run.engine.step()


def state(run):
    """Of each parameter: its partition on the device, its master and its moments."""
    get = deepspeed.utils
    run.accelerator.synchronize()
    return [
        [
            parameter.ds_tensor.clone(),
            get.safe_get_local_fp32_param(parameter).clone(),
            *(get.safe_get_local_optimizer_state(parameter, key).clone() for key in ("exp_avg", "exp_avg_sq")),
        ]
        for parameter in run.parameters
    ]


def same(one, other):
    return all(torch.equal(*pair) for parts in zip(one, other, strict=True) for pair in zip(*parts, strict=True))


def alone(*seeds, rewound=False):
    """What DeepSpeed alone makes of it; ``rewound``: after the second step, it goes on from there a second time."""
    run = start(attached=False, **(ALL_IN_FILES if rewound else {}))
    if rewound:
        iterate(run, *seeds[:2])
        folder = f"{os.environ['CHECKPOINTS']}/rewound-{runs}"
        run.engine.save_checkpoint(folder)
        iterate(run, seeds[2])
        run.engine.load_checkpoint(folder)
    iterate(run, *seeds[2 if rewound else 0 :])
    found = state(run)
    run.engine.destroy()
    return found


class Refusing:
    """Within the block, ``os.pwritev`` fails for requests that ``which`` names, until ``over`` is set."""

    def __init__(self, which, method="pwritev"):
        self.which, self.method, self.over, self.count, self.lock = (
            which,
            method,
            threading.Event(),
            0,
            threading.Lock(),
        )
        self.refused = set()

    def __enter__(self):
        self.original = getattr(os, self.method)
        setattr(os, self.method, self)
        return self

    def __exit__(self, *_):
        setattr(os, self.method, self.original)

    def __call__(self, descriptor, parts, offset):
        with self.lock:
            if (descriptor, offset) not in self.refused:
                if self.which(self.count):
                    self.refused.add((descriptor, offset))
                self.count += 1
        if (descriptor, offset) in self.refused and not self.over.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.original(descriptor, parts, offset)


def passed(run):
    """Whether the step's state passed through the stream."""
    return attachments.get(run.zero).states._stream is not None


def one_tile_that_cannot_be_written():
    """The step ends with an error, and so does a save, until it is; then everything is as if nothing had been."""
    expected = alone(1, 2, 3, 4)
    for number in (0, 5, 13, 22):
        run = start()
        iterate(run, 1, 2)
        assert passed(run)
        with Refusing(lambda each, number=number: each == number) as refusing:
            with pytest.raises(SwapError, match="optimizer state"):
                iterate(run, 3)
            with pytest.raises(SwapError, match="optimizer state"):
                run.engine.save_checkpoint(os.environ["CHECKPOINTS"] + f"/refused-{number}")
            with pytest.raises(SwapError, match="optimizer state"):
                run.engine.step()
            refusing.over.set()
            run.engine.save_checkpoint(os.environ["CHECKPOINTS"] + f"/saved-{number}")
            iterate(run, 4)
        assert same(state(run), expected), number
        run.engine.destroy()
    norms = []
    for attached in (False, True):  # DeepSpeed has ended the step: no norm of it counts in the next one
        run = start(attached=attached)
        iterate(run, 1, 2)
        with Refusing(lambda each, attached=attached: attached and each == 22) as refusing:
            with pytest.raises(SwapError) if attached else contextlib.nullcontext():
                iterate(run, 3)
            refusing.over.set()
            iterate(run, 4, used=(0, 2))
        norms.append(run.engine.get_global_grad_norm())
        run.engine.destroy()
    assert norms[0] == norms[1], norms


def a_full_drive_in_the_middle():
    """No slot can be written: the step ends, the next ones and saves raise, and a checkpoint helps."""
    expected = alone(1, 2, 3, 4, rewound=True)
    run = start(**ALL_IN_FILES)
    iterate(run, 1, 2)
    folder = os.environ["CHECKPOINTS"] + "/before"
    run.engine.save_checkpoint(folder)
    with Refusing(lambda number: number > 4) as refusing:
        with pytest.raises(SwapError, match="No space left"):
            iterate(run, 3)
        refusing.over.set()
    for _ in range(2):
        with pytest.raises(TransferError, match="load a checkpoint"):
            run.engine.step()
        with pytest.raises(TransferError, match="load a checkpoint"):
            run.engine.save_checkpoint(folder + "-refused")
    run.engine.load_checkpoint(folder)
    iterate(run, 3, 4)
    assert same(state(run), expected)
    run.engine.destroy()


def nobody_reads_a_file_that_lacks_what_could_not_be_written():
    """It is written first, or there is no reading, also where the next step is DeepSpeed's own, for somebody's hook."""
    expected = alone(1, 2, 3, 4)
    run = start()
    iterate(run, 1, 2)
    with Refusing(lambda number: number == 7) as refusing:
        with pytest.raises(SwapError, match="optimizer state"):
            iterate(run, 3)
        for read in (deepspeed.utils.safe_get_full_fp32_param, deepspeed.utils.safe_get_full_grad):
            with pytest.raises(SwapError, match="optimizer state"):
                read(run.parameters[0])
        run.zero.optimizer.register_step_pre_hook(lambda *_: None)
        with pytest.raises(SwapError, match="optimizer state"):
            run.engine.step()
        refusing.over.set()
        iterate(run, 4)
    assert same(state(run), expected)
    run.engine.destroy()


def a_read_that_fails():
    """The step ends in its middle, and a checkpoint helps."""
    expected = alone(1, 2, 3, 4, rewound=True)
    for first in (0, 8, 20):
        run = start(**ALL_IN_FILES)
        iterate(run, 1, 2)
        folder = os.environ["CHECKPOINTS"] + f"/read-{first}"
        run.engine.save_checkpoint(folder)
        with Refusing(lambda number, first=first: number >= first, "preadv"), pytest.raises(SwapError, match="read"):
            iterate(run, 3)
        with pytest.raises(TransferError, match="load a checkpoint"):
            run.engine.step()
        run.engine.load_checkpoint(folder)
        iterate(run, 3, 4)
        assert same(state(run), expected)
        run.engine.destroy()


def ctrl_c_wherever_it_falls():
    """The update of the sub-group is finished, later ones are as they were, and what was updated is in the files."""
    whole = {2: alone(1, 2), 3: alone(1, 2, 3)}
    for name in ("take", "updated", "settle"):
        original, number = getattr(FileStream, name), 0
        while True:
            number += 1
            run = start()
            iterate(run, 1, 2)
            calls = [0]

            def interrupted(*arguments, original=original, calls=calls, number=number):
                calls[0] += 1
                if calls[0] == number:
                    raise KeyboardInterrupt
                return original(*arguments)

            setattr(FileStream, name, interrupted)
            try:
                iterate(run, 3)
            except KeyboardInterrupt:
                pass
            else:
                break
            finally:
                setattr(FileStream, name, original)
                run.accelerator.synchronize()
            steps, found = {}, state(run)
            for index, parameter in enumerate(run.parameters):
                group = run.zero.grad_position[run.zero.get_param_id(parameter)][0]
                steps[group] = int(run.zero.optimizer.state[run.zero.fp32_partitioned_groups_flat[group]]["step"])
                assert same([found[index][1:]], [whole[steps[group]][index][1:]]), (name, number, index)
            assert sorted(steps.values(), reverse=True) == [steps[group] for group in sorted(steps)]
            run.engine.zero_grad()
            iterate(run, 4)  # nothing is torn
            run.engine.destroy()
        assert number > (1 if name == "settle" else 5), (name, number)


def a_checkpoint_is_carried_back_and_forth():
    expected, folder = None, os.environ["CHECKPOINTS"] + "/carried"
    ways = [(False, False), (True, False), (False, True), (True, True)]
    for number, (before, after, resident) in enumerate([*((*way, None) for way in ways), (True, True, "60KiB")]):
        run = start(attached=before, resident=resident)
        iterate(run, 1, 2, 3)
        run.engine.save_checkpoint(f"{folder}-{number}")
        run.engine.destroy()
        run = start(attached=after, resident=resident)
        run.engine.load_checkpoint(f"{folder}-{number}")
        iterate(run, 4, 5)
        expected = expected or state(run)  # DeepSpeed's own
        assert same(state(run), expected), (before, after)
        run.engine.destroy()


def a_step_leaves_gradients_as_they_were_reduced():
    """DeepSpeed scales them in a swap buffer, which it drops."""
    run = start()
    iterate(run, 1, 2)
    before = gradients(run)
    batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16()
    run.engine.backward(run.engine(batch, range(LAYERS)).float().pow(2).mean())
    reduced = gradients(run)
    assert not any(map(torch.equal, before, reduced))
    run.engine.step()
    assert passed(run)
    assert all(map(torch.equal, gradients(run), reduced))
    run.engine.destroy()


def a_master_that_is_set_keeps_its_gradient():
    """Between backward and step, before the state is in files and after; DeepSpeed lets go of all in memory then."""
    for steps in (0, 2):
        found = []
        for attached in (False, True):
            run = start(attached=attached)
            iterate(run, *range(steps))
            batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(7)).bfloat16()
            run.engine.backward(run.engine(batch, range(LAYERS)).float().pow(2).mean())
            weight = run.parameters[0]
            deepspeed.utils.safe_set_full_fp32_param(weight, torch.full(weight.ds_shape, 0.25))
            reduced = deepspeed.utils.safe_get_full_grad(weight).clone()
            run.engine.step()
            found.append([[reduced], *state(run)])
            run.engine.destroy()
        assert same(*found), steps


def gradients(run):
    """Of the parameters whose state is in files."""
    swapped = [each for each in run.parameters if run.zero.grad_position[run.zero.get_param_id(each)][0] < 2]
    return [deepspeed.utils.safe_get_local_grad(each).clone() for each in swapped]


def files_that_others_replace_are_opened_again():
    run = start()
    iterate(run, 1, 2)
    files = list(Path(run.zero.optimizer_swapper.swap_folder).glob("*.swp"))
    assert len(files) > 3
    for file in files:
        copy = file.with_suffix(".copy")
        shutil.copyfile(file, copy)
        file.write_bytes(b"")  # whoever still has it open would notice
        copy.replace(file)
    iterate(run, 3)
    assert same(state(run), alone(1, 2, 3))
    run.engine.destroy()


def what_stays_in_memory_is_in_the_files_for_everybody_who_reads_them():
    expected = alone(1, 2, 3, 4)
    for resident in ("30KiB", "1MiB"):
        run = start(resident=resident)
        iterate(run, 1, 2, 3)
        stale = files_of(run)
        zero3.flush(run.engine)
        flushed = files_of(run)
        assert flushed != stale
        run.engine.save_checkpoint(os.environ["CHECKPOINTS"] + f"/flushed-{resident}")
        assert files_of(run) == flushed
        iterate(run, 4)
        assert (files_of(run) == flushed) == (resident == "1MiB"), "what stays is not written in a step"
        zero3.detach(run.engine)
        assert same(state(run), expected), resident
        run.engine.destroy()


def files_of(run):
    """The bytes of the files with state."""
    paths = Path(run.zero.optimizer_swapper.swap_folder).glob("*.swp")
    return {path.name: path.read_bytes() for path in paths if "gradient" not in path.name}


def what_stays_in_memory_and_cannot_be_written():
    """Steps go on, saves and readers raise, until it is written."""
    expected = alone(1, 2, 3, 4)
    run = start(resident="1MiB")
    iterate(run, 1, 2, 3)
    with Refusing(lambda number: number == 5) as refusing:
        for attempt in (run.engine.save_checkpoint, lambda _: state(run), lambda _: zero3.flush(run.engine)):
            with pytest.raises(SwapError, match="optimizer state"):
                attempt(os.environ["CHECKPOINTS"] + "/resident-refused")
        iterate(run, 4)
        refusing.over.set()
        run.engine.save_checkpoint(os.environ["CHECKPOINTS"] + "/resident-saved")
    assert same(state(run), expected)
    run.engine.destroy()


def files_that_others_write_while_newer_state_is_in_memory():
    """Neither is thrown away without a word; a checkpoint helps."""
    expected = alone(1, 2, 3, 4, rewound=True)
    run = start(resident="1MiB", **ALL_IN_FILES)
    iterate(run, 1, 2)
    folder = os.environ["CHECKPOINTS"] + "/before-others"
    run.engine.save_checkpoint(folder)
    iterate(run, 3)
    for path in Path(run.zero.optimizer_swapper.swap_folder).glob("*.swp"):
        path.write_bytes(path.read_bytes())
    for attempt in (run.engine.step, lambda: run.engine.save_checkpoint(folder + "-x"), lambda: state(run)):
        with pytest.raises(TransferError, match="written by other code"):
            attempt()
    run.engine.load_checkpoint(folder)
    iterate(run, 3, 4)
    assert same(state(run), expected)
    run.engine.destroy()


def two_runs_with_one_folder():
    """The second one is refused: it would write the files of the first."""
    run = start()
    iterate(run, 1, 2)
    folder = run.zero.optimizer_swapper.swap_folder
    assert "another process uses these swap files" in marked_by_another_process(folder)
    run.engine.destroy()
    assert marked_by_another_process(folder) == "marked"


def marked_by_another_process(folder):
    """What comes of it there, as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            scratch.mark(Path(folder))
            os.write(writer, b"marked")
        except SwapError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as answer:
        return answer.read()


def files_are_closed_and_memory_given_back():
    run = start()
    iterate(run, 1, 2)
    transfer, threads = attachments.get(run.zero).transfer, threading.active_count()

    def open_files():
        links = [each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        return [each for each in links if each.name.endswith(".swp")]

    assert open_files()
    assert transfer.pinned_bytes > 0
    run.engine.destroy()
    assert not open_files()
    assert transfer.pinned_bytes == 0
    assert threading.active_count() < threads


CASES = (
    one_tile_that_cannot_be_written,
    a_full_drive_in_the_middle,
    nobody_reads_a_file_that_lacks_what_could_not_be_written,
    a_read_that_fails,
    ctrl_c_wherever_it_falls,
    a_checkpoint_is_carried_back_and_forth,
    a_step_leaves_gradients_as_they_were_reduced,
    a_master_that_is_set_keeps_its_gradient,
    files_that_others_replace_are_opened_again,
    what_stays_in_memory_is_in_the_files_for_everybody_who_reads_them,
    what_stays_in_memory_and_cannot_be_written,
    files_that_others_write_while_newer_state_is_in_memory,
    two_runs_with_one_folder,
    files_are_closed_and_memory_given_back,
)

if __name__ == "__main__":
    main_of(CASES)
