"""Breaks the product in one place after the other, and shows which tests notice. Run by hand::

    python tests/mutants.py            # all of them; some minutes
    python tests/mutants.py WAIT ...   # those whose name contains a word
    python tests/mutants.py --check    # only whether each can still be applied

Each is applied to a copy of the tree of its own, and its tests are run there until the first failure. A survivor is a
place where a mistake would go unnoticed. Ends with 1 where one survived, 2 where one does not fit the code any more.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SUITE = "tests/transfer/strategies/test_conformance.py::"


class Mutant(NamedTuple):
    """One mistake."""

    name: str
    file: str
    old: str  # stands in the file exactly once
    new: str
    tests: tuple[str, ...]  # those that are expected to notice, as arguments of pytest


VERIFY = ("tests/transfer/verification",)

GRADIENTS = "transfer/zero3/gradients/"
LAZY = ("tests/zero3/gradients",)
SWAPPED = "transfer/zero3/swapped/"
STREAM = ("tests/zero3/swapped",)

MUTANTS = [
    Mutant(
        "a sample is read before its copy",
        "transfer/verification/reading.py",
        "        copy.order_after(self._stream)\n",
        "",
        VERIFY,
    ),
    Mutant(
        "a slot is used again while its sample is needed",
        "transfer/verification/reading.py",
        "            user.keep()\n        snapshot",
        "            pass\n        snapshot",
        VERIFY,
    ),
    Mutant(
        "a sample is compared before it is read",
        "transfer/verification/reading.py",
        "                self.event.synchronize()\n",
        "                pass\n",
        VERIFY,
    ),
    Mutant(
        "later work of a stream does not wait for the sample",
        "transfer/verification/reading.py",
        "            stream.wait_event(event)\n",
        "            pass\n",
        VERIFY,
    ),
    Mutant(
        "the same elements are compared in each copy",
        "transfer/verification/sampling.py",
        "random.randrange(spacing), spacing",
        "0, spacing",
        VERIFY,
    ),
    Mutant(
        "the elements behind the last row are never compared",
        "transfer/verification/sampling.py",
        " if numel % row else []",
        " if numel < row else []",
        VERIFY,
    ),
    Mutant(
        "a NaN is right whatever stands there",
        "transfer/verification/comparing.py",
        "_is_nan(expected) & _is_nan(found)",
        "_is_nan(expected)",
        VERIFY,
    ),
    Mutant(
        "a wrong tile is told by its own elements",
        "transfer/zero3/attachment.py",
        "in_sub_group(sub_group_id, offset)",
        "in_sub_group(sub_group_id, 0)",
        ("tests/zero3/test_verified.py",),
    ),
    Mutant(
        "pageable does not wait for the stream",
        "transfer/in_flight.py",
        "        stream.synchronize()\n",
        "        pass\n",
        (SUITE + "TestPageable",),
    ),
    Mutant(
        "a staging buffer is reused while a copy reads it",
        "transfer/memory/staging_ring.py",
        "            event.synchronize()\n",
        "            pass\n",
        (SUITE + "TestPinnedStaged",),
    ),
    Mutant(
        "a staging ring that is closed stays pinned",
        "transfer/memory/staging_ring.py",
        "            self._accelerator.unpin_memory(self._buffers[-1].memory)\n",
        "",
        (SUITE + "TestPinnedStaged",),
    ),
    Mutant(
        "a ring that an error interrupted is used again at once",
        "transfer/memory/staging_ring.py",
        "            self._accelerator.synchronize(self._device_index)\n            for buffer",
        "            for buffer",
        (SUITE + "TestPinnedStaged", "tests/transfer/strategies/test_pinned_staged.py"),
    ),
    Mutant(
        "a copy while a graph is recorded is let pass",
        "transfer/accelerator_choice.py",
        "    if ask is not None and ask(device_index):\n",
        "    if False:\n",
        ("tests/transfer/test_graph_capture.py",),
    ),
    Mutant(
        "an event that never answers is taken for an end",
        "transfer/memory/scratch_ring.py",
        "                self._accelerator.synchronize(self._device_index)\n",
        "                pass\n",
        ("tests/transfer/test_graph_capture.py",),
    ),
    Mutant(
        "the device's own streams do not follow the caller's",
        "transfer/memory/scratch_ring.py",
        "            slot.stream.wait_event(queued_before)\n",
        "",
        (SUITE + "TestPinnedDirectInChunks",),
    ),
    Mutant(
        "a source counts as free while the device reads it",
        "transfer/in_flight.py",
        "        if pending is not None and pending[2] is not None:\n            self.wait()\n",
        "        return\n",
        (SUITE + "TestPinnedDirect",),
    ),
    Mutant(
        "a source is given back to the system while the device reads it",
        "transfer/memory/owned_locks.py",
        "        self._owned.settle()\n",
        "",
        (SUITE + "TestPinnedDirect", "tests/transfer/strategies/test_pinned_direct.py"),
    ),
    Mutant(
        "nothing waits for the device before an error goes on",
        "transfer/in_flight.py",
        "        accelerator.synchronize(destination.device.index)\n",
        "        pass\n",
        (SUITE + "TestPinnedStaged", SUITE + "TestPinnedDirect"),
    ),
    Mutant(
        "the guards for overlap and for the same memory are swapped",
        "transfer/validation.py",
        "    if _is_same_view(destination, source):\n        return False\n"
        "    if destination.device == source.device and share_elements(destination, source):\n"
        '        raise _invalid("destination and source overlap in part", destination, source)\n',
        "    if destination.device == source.device and share_elements(destination, source):\n"
        '        raise _invalid("destination and source overlap in part", destination, source)\n'
        "    if _is_same_view(destination, source):\n        return False\n",
        (SUITE + "TestPageable",),
    ),
    Mutant(
        "strides are ignored where a destination is cut",
        "transfer/memory/chunks.py",
        "        return tensor.view(-1)\n",
        "        return tensor.as_strided((tensor.numel(),), (1,))\n",
        (SUITE + "TestPinnedStaged",),
    ),
    Mutant(
        "a chunk of a file is used before it was read",
        "transfer/strategies/nvme_swapped.py",
        "            wait()\n",
        "",
        (SUITE + "TestNvmeSwapped", "tests/nvme/test_swapping.py"),
    ),
    Mutant(
        "checksums are not compared",
        "transfer/nvme/read_ahead.py",
        "    wrong = checksums.first_mismatch(first_byte, values)\n",
        "    wrong = None\n",
        ("tests/nvme/test_swap_files.py", "tests/nvme/test_swapping.py"),
    ),
    Mutant(
        "the simulated accelerator forgives a write under a read",
        "accelerators/simulated/late_queue.py",
        "        if both_write or share_elements(new_written, old_read):\n",
        "        if both_write:\n",
        ("tests/accelerators/test_simulated_catches.py",),
    ),
    Mutant(
        "the simulated accelerator's events mark nothing",
        "accelerators/simulated/late_queue.py",
        "            self._queue.reach([self.mark])\n\n    def query",
        "            pass\n\n    def query",
        ("tests/accelerators/test_simulated.py", "tests/accelerators/test_simulated_catches.py"),
    ),
    Mutant(
        "a ZeRO-3 step ends before its copies",
        "transfer/zero3/attachment.py",
        "        run_all([functools.partial(_wait, *each) for each in self._in_flight])\n",
        "",
        ("tests/zero3/test_deferred.py",),
    ),
    Mutant(
        "a ZeRO-3 update writes what a copy still reads",
        "transfer/zero3/step.py",
        "        attachment.release_source(sub_group_id)  # an update writes what a copy might still read\n",
        "",
        ("tests/zero3/test_deferred.py",),
    ),
    Mutant(
        "code of a user's counts as DeepSpeed's",
        "transfer/zero3/known_code.py",
        "        if depth == 0 or not _is_of_known_module(value):\n",
        "        if depth == 0:\n",
        ("tests/zero3/test_known_code.py",),
    ),
    Mutant(
        "hooks of an optimizer are overlooked",
        "transfer/zero3/plan.py",
        " *map(step_hooks, updaters),",
        "",
        ("tests/zero3/test_known_code.py",),
    ),
    Mutant(
        "copies run on behind a step whose end has lost its patch",
        "transfer/zero3/plan.py",
        "        if not is_patched(getattr(type(stage3.optimizer), name)):\n",
        "        if False:\n",
        ("tests/zero3/test_known_code.py",),
    ),
    Mutant(
        "what was known at the start of a step is not asked again",
        "transfer/zero3/plan.py",
        "        if self.waits_because is None:\n            self.waits_because = why_wait(",
        "        if False:\n            self.waits_because = why_wait(",
        ("tests/zero3/test_plan.py",),
    ),
    Mutant(
        "a tensor that wraps others counts as memory",
        "accelerators/overlap.py",
        "    if kind.__torch_dispatch__ is _NO_DISPATCH:\n        return None\n",
        "    return None\n",
        (SUITE + "TestPageable", "tests/transfer/test_tensors_without_memory.py"),
    ),
    Mutant(
        "an address of 0 counts as one",
        "accelerators/overlap.py",
        "        has_memory = bool(tensor.data_ptr()) or tensor.numel() == 0\n",
        "        has_memory = tensor.data_ptr() is not None\n",
        (SUITE + "TestPageable", "tests/transfer/test_tensors_without_memory.py"),
    ),
    # Gradients that go to the host once
    Mutant(
        "a gradient is read while it is on its way to the host",
        GRADIENTS + "host_gradients.py",
        "        for event in self._events:\n            event.synchronize()\n",
        "",
        LAZY,
    ),
    Mutant(
        "a micro-step writes over what the last step left",
        GRADIENTS + "host_gradients.py",
        "if not is_final and piece.current == piece.final:",
        "if False:",
        LAZY,
    ),
    Mutant(
        "what a micro-step left is taken for the gradient of the step",
        GRADIENTS + "host_gradients.py",
        "        if is_final:\n            taken.reduced(piece)\n",
        "        taken.reduced(piece)\n",
        LAZY,
    ),
    Mutant(
        "a reduction adds to memory that holds nothing yet",
        GRADIENTS + "host_gradients.py",
        "                    copy.wait()  # to compare it, before it is added to\n",
        "                    pass\n",
        LAZY,
    ),
    Mutant(
        "values that differ when they are taken over are lost",
        GRADIENTS + "taking_over.py",
        "            if not torch.equal(here, there):\n",
        "            if False:\n",
        LAZY,
    ),
    Mutant(
        "a detached optimizer keeps the second buffer",
        GRADIENTS + "host_gradients.py",
        "            if piece.current:\n",
        "            if False:\n",
        LAZY,
    ),
    Mutant(
        "factors of steps before a reduction stay",
        GRADIENTS + "master_gradient.py",
        "piece.final, piece.since = piece.current, len(self._factors)",
        "piece.final = piece.current",
        LAZY,
    ),
    Mutant(
        "a gradient that was set is not scaled",
        GRADIENTS + "master_gradient.py",
        "                    piece.own.mul_(factor)\n",
        "                    pass\n",
        LAZY,
    ),
    Mutant(
        "the next reduction does not replace a gradient that was set",
        GRADIENTS + "master_gradient.py",
        "        piece.own, piece.is_zero = None, False\n",
        "        piece.is_zero = False\n",
        LAZY,
    ),
    Mutant(
        "dropped factors are those of pieces that need them",
        GRADIENTS + "master_gradient.py",
        "applied - piece.since > MOST_FACTORS // 2:",
        "False:",
        LAZY,
    ),
    Mutant(
        "pieces of two buffers are read from one",
        GRADIENTS + "master_gradient.py",
        "(one.final, one.since) == (other.final, other.since)",
        "one.since == other.since",
        LAZY,
    ),
    Mutant(
        "a view of a lazy gradient is a copy",
        GRADIENTS + "lazy_gradient.py",
        "LazyGradient.hold if keep else LazyGradient.values",
        "LazyGradient.values",
        LAZY,
    ),
    Mutant(
        "the check for overflow looks at one buffer of two",
        GRADIENTS + "buffers.py",
        "if used == {0} or",
        "if used or",
        LAZY,
    ),
    Mutant(
        "a tile does not end at a whole vector",
        "transfer/zero3/tiles.py",
        "    step = aligned(tile_elements)\n",
        "    step = max(1, tile_elements - 1)\n",
        (*LAZY, "tests/zero3/test_tiles.py"),
    ),
    Mutant(
        "a copy has elements that are not updated yet",
        "transfer/zero3/tiles.py",
        "self._submit(self._begin, end - self._begin)",
        "self._submit(self._begin, self._state[0].numel() - self._begin)",
        ("tests/zero3/test_tiles.py", "tests/zero3/test_plan.py"),
    ),
    Mutant(
        "tiles of a master that has moved count as copied",
        "transfer/zero3/plan.py",
        " and tiled[1] == _place(*partitions)",
        "",
        ("tests/zero3/test_plan.py",),
    ),
    Mutant(
        "a slot is read into while the device still reads its master",
        SWAPPED + "slots.py",
        "                self.copy.release_source()\n",
        "                pass\n",
        STREAM,
    ),
    Mutant(
        "a tile is updated before it was read",
        SWAPPED + "file_stream.py",
        "            slot.wait()\n        except BaseException:\n            with",
        "            pass\n        except BaseException:\n            with",
        STREAM,
    ),
    Mutant(
        "a slot is free while it is written",
        SWAPPED + "file_stream.py",
        "        try:\n            slot.wait()\n        except SwapError:\n",
        "        try:\n            pass\n        except SwapError:\n",
        STREAM,
    ),
    Mutant(
        "what could not be written is forgotten",
        SWAPPED + "file_stream.py",
        "            self._unwritten.append(self._written.popleft())\n            raise\n",
        "            self._free.append(self._written.popleft())\n            raise\n",
        STREAM,
    ),
    Mutant(
        "a step goes on behind one that ended in the middle of a sub-group",
        SWAPPED + "file_stream.py",
        "        if self._torn is not None:\n            raise TransferError(self._torn)\n",
        "",
        STREAM,
    ),
    Mutant(
        "what an interrupted step has left is written over a checkpoint",
        SWAPPED + "file_stream.py",
        "        self._unwritten.clear()\n",
        "",
        STREAM,
    ),
    Mutant(
        "a tile that was updated when Ctrl-C came is not written",
        "transfer/zero3/tiles.py",
        "            if submitted < updated:\n",
        "            if False:\n",
        STREAM,
    ),
    Mutant(
        "the rest of a short transfer is not made",
        SWAPPED + "state_file.py",
        "            at += done\n",
        "            at = len(memory)\n",
        STREAM,
    ),
    Mutant(
        "a file that was replaced is written on",
        SWAPPED + "swapped_states.py",
        " and all(file.is_there for file in files)",
        "",
        STREAM,
    ),
    Mutant(
        "what stays in memory is not written before somebody reads the files",
        "transfer/zero3/checkpoint.py",
        "            attachment.states.let_go()\n",
        "            pass\n",
        STREAM,
    ),
    Mutant(
        "a checkpoint does not make void what stays in memory",
        SWAPPED + "file_stream.py",
        "        self._residents.drop()\n        was_torn",
        "        was_torn",
        STREAM,
    ),
    Mutant(
        "what stays in memory and was not written counts as written",
        SWAPPED + "residents.py",
        "        super().wait()\n        self.is_dirty = False\n",
        "        self.is_dirty = False\n        super().wait()\n",
        STREAM,
    ),
    Mutant(
        "files that others have written are not noticed",
        SWAPPED + "state_file.py",
        "self.is_there and self._noted == self._written_last()",
        "self.is_there",
        STREAM,
    ),
    Mutant(
        "two runs may have one folder",
        SWAPPED + "scratch.py",
        "                    try_lock(descriptor)\n",
        "",
        STREAM,
    ),
    Mutant(
        "the factors of a step stay with the gradient of a sub-group in files",
        GRADIENTS + "host_gradients.py",
        "LazyGradient(StepGradient(taken), 0, taken.numel)",
        "LazyGradient(taken, 0, taken.numel)",
        STREAM,
    ),
    Mutant(
        "the gradient of a sub-group in files is not shown again after a step",
        "transfer/zero3/step.py",
        "            attachment.gradients.show(sub_group_id)\n",
        "            pass\n",
        LAZY,
    ),
    Mutant(
        "steps end before the files hold everything",
        "transfer/zero3/step.py",
        "        attachment.states.settle()  # last",
        "        # last",
        STREAM,
    ),
    Mutant(
        "masters that will move to shared memory are page-locked",
        "transfer/zero3/attachment.py",
        "stage3.overrides_step and not master.is_shared()",
        "False",
        ("tests/zero3/test_deferred.py",),
    ),
    Mutant(
        "SuperOffload's step ends twice",
        "transfer/zero3/step.py",
        "attachment is None or attachment.is_ending",
        "attachment is None",
        ("tests/zero3/inside",),
    ),
    Mutant(
        "any copy to a partition is taken for one from its master",
        "transfer/zero3/inside/watching.py",
        "key is not None and known_source == _place(source)",
        "key is not None",
        ("tests/zero3/inside",),
    ),
    Mutant(
        "a restore in another way goes unnoticed",
        "transfer/zero3/inside/watching.py",
        "                self.missing.discard(key)\n",
        "                self.missing.clear()\n",
        ("tests/zero3/inside",),
    ),
    Mutant(
        "a negative view loses its sign",
        "transfer/validation.py",
        "source.resolve_neg() if source.is_neg() else source",
        "source",
        ("tests/transfer/test_negative_views.py",),
    ),
]


def problem(mutant):
    """Why it cannot be applied, or None."""
    file = ROOT / mutant.file
    found = file.read_text().count(mutant.old) if file.exists() else 0
    return None if found == 1 else f"{mutant.file} holds its old text {found} times, not once"


def killer(mutant, timeout):
    """The first test that failed, ``"timeout"``, or None where it has survived."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__"))
        file = tree / mutant.file
        file.write_text(file.read_text().replace(mutant.old, mutant.new))
        options = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:randomly", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *mutant.tests],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree)},
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "timeout"
    if done.returncode == 0:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode != 1 or not failed:
        raise RuntimeError(f"{mutant.name}: pytest ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr}")
    return failed[0].partition(" ")[2].partition(" - ")[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only the mutants whose name contains one of these")
    parser.add_argument("--check", action="store_true", help="only tell whether each can be applied")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for the tests of each")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.words or any(word.lower() in m.name.lower() for word in options.words)]
    misfits = {mutant.name: text for mutant in chosen if (text := problem(mutant))}
    for name, text in misfits.items():
        print(f"does not fit: {name}: {text}")
    if misfits or options.check:
        return 2 if misfits else 0
    survived = 0
    for mutant in chosen:
        started = time.monotonic()
        by = killer(mutant, options.timeout)
        survived += by is None
        verdict = "SURVIVED" if by is None else "killed"
        print(f"{verdict:8}  {time.monotonic() - started:4.0f} s  {mutant.name:66}  {by or ''}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} killed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
