"""Exits and forks, each in a process of its own."""

import textwrap

import pytest

from tests.running import SIMULATED_PREAMBLE, ends_quietly, run_program, run_python, succeeds

PREAMBLE = f"""{SIMULATED_PREAMBLE}
transfer = PinnedStagedTransfer(accelerator=simulated, chunk_elements=3)
"""


def run(program, **how):
    return run_program(PREAMBLE + textwrap.dedent(program), **how)


@pytest.mark.parametrize(
    ("end", "code", "stderr"),
    [("", 0, ""), ("sys.exit(3)", 3, ""), ("raise OSError('mine')", 1, "OSError: mine\n"), ("del transfer", 0, "")],
)
def test_ending_without_close_is_quiet(end, code, stderr):
    done = run(f"copy = transfer.submit(destination, torch.arange(10.0))\n{end}", tear_down=True)
    ends_quietly(done, code, stderr)


def test_at_exit_everything_is_waited_for_and_given_back():
    done = run("""
        at_exit.append(lambda: print(simulated.pinned_bytes, destination.tolist() == list(range(10))))
        transfer.submit(destination, torch.arange(10.0))
    """)
    succeeds(done, "0 True\n")


def test_a_fork_gets_a_clear_error_and_leaves_the_parent_alone():
    done = run("""
        transfer.copy(destination, torch.arange(10.0))
        pinned = simulated.pinned_bytes
        child = os.fork()
        if child == 0:
            try:
                transfer.copy(destination, torch.ones(10))
            except ForkedProcessError as error:
                assert isinstance(error, TransferError) and "build a new one" in str(error)
                transfer.close()
                assert transfer.pinned_bytes == pinned, "the parent's buffers are not the child's to unpin"
                fresh = PinnedStagedTransfer(accelerator=SimulatedAccelerator(), chunk_elements=3)
                mine = fresh.accelerator.device_empty(10, dtype=torch.bfloat16)
                fresh.copy(mine, torch.arange(10.0))
                assert mine.tolist() == list(range(10))
                sys.exit(7)
            sys.exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        transfer.copy(destination, torch.ones(10))
        assert destination.tolist() == [1.0] * 10
        print("parent works")
    """)
    succeeds(done, "parent works\n")


def test_a_transfer_made_before_a_fork_and_first_used_after_it_works_in_both():
    done = run("""
        child = os.fork()
        transfer.copy(destination, torch.arange(10.0))
        assert destination.tolist() == list(range(10))
        transfer.close()
        assert simulated.pinned_bytes == 0
        if child == 0:
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    """)
    succeeds(done)


@pytest.mark.parametrize("routed", [False, True])
def test_a_fork_while_another_thread_is_in_submit_does_not_hang(routed):
    build = (
        'transfer = build_transfer({"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 3}}, simulated)'
    )
    done = run(
        (build if routed else "")
        + textwrap.dedent("""
        import threading
        inside, leave = threading.Event(), threading.Event()
        original = simulated.enqueue_copy
        def slow(*tensors):
            inside.set()
            leave.wait(30)
            original(*tensors)
        simulated.enqueue_copy = slow
        thread = threading.Thread(target=transfer.copy, args=(destination, torch.arange(10.0)))
        thread.start()
        inside.wait(30)
        child = os.fork()
        if child == 0:
            transfer.close()
            try:
                transfer.copy(destination, torch.ones(10))
            except ForkedProcessError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        leave.set()
        thread.join(30)
        assert destination.tolist() == list(range(10))
    """)
    )
    succeeds(done)


@pytest.mark.slow
def test_importing_transfer_starts_nothing():
    """Not even a transfer on the simulated accelerator, which imports nothing of DeepSpeed."""
    done = run(
        """
        assert not [name for name in sys.modules if name.split(".")[0] == "deepspeed"]
        assert not torch.cuda.is_initialized()
        build_transfer({"accelerator": "cuda", "strategy": "pinned_staged"})
        TransferPolicy({"accelerator": "cuda"})
        assert not [name for name in sys.modules if name.split(".")[0] == "deepspeed"]
        assert not torch.cuda.is_initialized()
        """,
        forked=False,
    )
    succeeds(done)


def test_importing_accelerators_needs_neither_torch_nor_deepspeed():
    program = "import sys, accelerators; assert not {'torch', 'deepspeed'} & set(sys.modules)"
    done = run_python("-c", program, timeout=60)
    assert done.returncode == 0, done.stderr
