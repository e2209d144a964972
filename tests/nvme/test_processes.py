"""Exits, forks and other processes: files are deleted with their owner, and other files stay."""

import textwrap

import pytest

from tests.nvme.tools import PREAMBLE, files_below
from tests.running import ends_quietly, run_program, succeeds

pytestmark = pytest.mark.slow

SIMULATED = f"""
{PREAMBLE}
from accelerators.simulated import SimulatedAccelerator
simulated = SimulatedAccelerator()
destination = simulated.device_empty(200_000, dtype=torch.bfloat16)
swapped = swap_out(torch.ones(200_000), root)
transfer = NvmeSwappedTransfer(accelerator=simulated, chunk_elements=65_536, path=str(root))
"""


def run(program, root, **how):
    return run_program(SIMULATED + textwrap.dedent(program), root, **how)


SLOW_READS = """
preadv = os.preadv
def slow(*args):
    time.sleep(0.1)
    return preadv(*args)
os.preadv = slow
"""


@pytest.mark.parametrize(
    ("end", "code", "stderr"), [("", 0, ""), ("sys.exit(3)", 3, ""), ("raise OSError('mine')", 1, "OSError: mine\n")]
)
def test_ending_without_close_is_quiet(root, end, code, stderr):
    """With copies in flight, handles alive, and reads in flight in another thread."""
    done = run(
        SLOW_READS
        + textwrap.dedent("""
        at_exit.append(lambda: print(simulated.pinned_bytes, bool((destination == 1).all()), bool((other == 1).all())))
        at_exit.append(lambda: print(sorted(path.name for path in root.iterdir())))
        other = simulated.device_empty(200_000, dtype=torch.bfloat16)
        busy = NvmeSwappedTransfer(accelerator=simulated, chunk_elements=65_536)
        thread = threading.Thread(target=busy.copy, args=(other, swapped))
        thread.start()
        copy = transfer.submit(destination, swapped)
        """)
        + end,
        root,
        tear_down=True,
    )
    ends_quietly(done, code, stderr)
    assert done.stdout == "0 True True\n[]\n"


def test_ending_while_a_daemon_thread_reads(root):
    """No thread waits for its copy. Python may end such a thread in the middle of torch, but the files are gone."""
    done = run(
        SLOW_READS
        + textwrap.dedent("""
        def work():
            while True:
                transfer.copy(destination, swapped)
        threading.Thread(target=work, daemon=True).start()
        time.sleep(0.3)
        sys.exit(3)
        """),
        root,
        tear_down=True,
    )
    assert done.returncode != 0
    assert not files_below(root)


def test_reading_and_writing_at_exit(root):
    """When no thread can be started any more."""
    done = run(
        """
        def late():
            transfer.copy(destination, swapped)
            assert (destination == 1).all()
            assert nvme.swap_in(swap_out(torch.arange(3_000_000.0), root))[2_999_999] == 2_999_999
            print("done")
        atexit.register(late)
        """,
        root,
    )
    succeeds(done, "done\n")
    assert not files_below(root)


def test_a_fork_owns_nothing_of_its_parent_and_works_by_itself(root):
    done = run(
        """
        transfer.copy(destination, swapped)
        pinned = simulated.pinned_bytes
        dropped = swap_out(torch.ones(3), root)
        kept = dropped.path
        def work():
            try:
                transfer.copy(destination, swapped)
            except ForkedProcessError as error:
                assert "build a new one" in str(error)
            else:
                raise SystemExit("was not refused")
            transfer.close()
            assert transfer.pinned_bytes == pinned, "the parent's buffers are not the child's to unpin"
            assert nvme.swap_in(swapped).tolist() == [1.0] * 200_000
            mine = swap_out(torch.arange(5.0), root)
            assert mine.path.parent != swapped.path.parent
            assert nvme.swap_in(mine).tolist() == [0, 1, 2, 3, 4]
            fresh = NvmeSwappedTransfer(accelerator=SimulatedAccelerator(), chunk_elements=65_536)
            there = fresh.accelerator.device_empty(200_000, dtype=torch.bfloat16)
            fresh.copy(there, swapped)
            assert (there == 1).all()
            swapped.delete()
            globals().pop("dropped")
        assert ended(child(work)) == 0
        assert swapped.path.exists()
        assert kept.exists()
        transfer.copy(destination, swapped)
        assert [path for path in root.glob("h2d-swap-rank*")] == [swapped.path.parent], "the child has tidied up"
        """,
        root,
    )
    succeeds(done)


def test_a_fork_does_not_keep_the_lock_of_its_parent(root):
    """What the parent leaves behind is deleted while its child still runs."""
    done = run(
        """
        there, end = Gate(), Gate()
        def grandchild():
            there.open()
            end.wait()
        def killed():
            mine = swap_out(torch.ones(3), root)
            (root / "path").write_text(str(mine.path))
            child(grandchild)
            there.wait()
            os.kill(os.getpid(), 9)
        assert ended(child(killed)) == -9
        path = Path((root / "path").read_text())
        assert path.exists()
        assert ended(child(swap_out, torch.ones(3), root)) == 0
        assert not path.exists()
        assert nvme.swap_in(swapped).tolist() == [1.0] * 200_000
        end.open()
        """,
        root,
    )
    succeeds(done)


def test_a_transfer_made_before_a_fork_and_first_used_after_it_works_in_both(root):
    done = run(
        """
        def work():
            transfer.copy(destination, swapped)
            assert (destination == 1).all()
            assert transfer.pinned_bytes > 0
            transfer.close()
            assert simulated.pinned_bytes == transfer.pinned_bytes == transfer.scratch_bytes == 0
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("h2d-")]
        assert ended(child(work)) == 0
        work()
        """,
        root,
    )
    succeeds(done)


def test_a_fork_while_another_thread_reads_does_not_hang(root):
    done = run(
        SLOW_READS
        + textwrap.dedent("""
        thread = threading.Thread(target=transfer.copy, args=(destination, swapped))
        thread.start()
        time.sleep(0.05)
        def work():
            transfer.close()
            os.preadv = preadv
            assert nvme.swap_in(swapped).tolist() == [1.0] * 200_000
            assert nvme.swap_in(swap_out(torch.ones(3), root)).tolist() == [1, 1, 1]
        assert ended(child(work)) == 0
        thread.join(30)
        assert (destination == 1).all()
        """),
        root,
    )
    succeeds(done)


def test_a_pickled_handle_in_another_process(root):
    """Which reads it and owns nothing, and says what has become of the file when it is gone."""
    done = run(
        """
        import pickle
        pickled, path = pickle.dumps(swapped), swapped.path
        read, gone = Gate(), Gate()
        def work():
            assert nvme.swap_in(pickle.loads(pickled)).tolist() == [1.0] * 200_000
            read.open()
            gone.wait()
            try:
                nvme.swap_in(pickle.loads(pickled))
            except SwapFileNotFoundError as error:
                again = pickle.loads(pickle.dumps(error))
                assert again.filename == error.filename == str(path)
                assert str(again) == str(error)
            else:
                raise SystemExit("was read")
        other = child(work)
        read.wait()
        assert path.exists()
        del swapped
        gone.open()
        assert ended(other) == 0
        """,
        root,
    )
    succeeds(done)


def test_files_of_a_process_that_ends_normally_are_gone_and_raw_ones_stay(root, tmp_path):
    (tmp_path / "theirs.bin").write_bytes(bytes(40))
    done = run(
        """
        handle = SwappedTensor.from_file(root.parent / "theirs.bin", torch.float32, 10)
        handle.delete()
        assert nvme.swap_in(handle).tolist() == [0] * 10
        del handle
        keep = [swap_out(torch.ones(3), root, str(i)) for i in range(5)]
        """,
        root,
    )
    succeeds(done)
    assert not [*root.iterdir()]
    assert (tmp_path / "theirs.bin").read_bytes() == bytes(40)
