"""Exits and forks with sources page-locked in place, each in a process of its own."""

import textwrap

import pytest

from tests.running import SIMULATED_PREAMBLE, ends_quietly, run_program, succeeds

PREAMBLE = f"""{SIMULATED_PREAMBLE}
transfer = PinnedDirectTransfer(accelerator=simulated, chunk_elements=3, mapped=False, fallback=False)
source = torch.arange(10.0)
"""


def run(program, **how):
    return run_program(PREAMBLE + textwrap.dedent(program), **how)


@pytest.mark.parametrize(
    ("end", "code", "stderr"),
    [("", 0, ""), ("sys.exit(3)", 3, ""), ("raise OSError('mine')", 1, "OSError: mine\n"), ("del transfer", 0, "")],
)
def test_ending_without_close_is_quiet(end, code, stderr):
    done = run(f"transfer.prepare(source)\ncopy = transfer.submit(destination, source)\n{end}", tear_down=True)
    ends_quietly(done, code, stderr)


def test_at_exit_everything_is_waited_for_and_given_back():
    done = run("""
        at_exit.append(lambda: print(simulated.pinned_bytes, destination.tolist() == list(range(10))))
        transfer.prepare(source)
        transfer.submit(destination, source)
        assert simulated.pinned_bytes == 40
    """)
    succeeds(done, "0 True\n")


def test_a_fork_gets_a_clear_error_and_leaves_the_registrations_alone():
    done = run("""
        transfer.prepare(source)
        transfer.copy(destination, source)
        asked = []
        simulated.unregister_host_memory = lambda address: asked.append(address)
        child = os.fork()
        if child == 0:
            for use in (lambda: transfer.copy(destination, source), lambda: transfer.prepare(source)):
                try:
                    use()
                    os._exit(1)
                except ForkedProcessError as error:
                    assert "build a new one" in str(error)
            transfer.unprepare(source)
            transfer.close()
            # A new transfer does not take the parent's registration, of the same storage, for its own.
            here = SimulatedAccelerator()
            for _ in range(2):
                fresh = PinnedDirectTransfer(accelerator=here, chunk_elements=3, mapped=False)
                mine = here.device_empty(10, dtype=torch.bfloat16)
                fresh.prepare(source)
                assert here.pinned_bytes == 40
                fresh.copy(mine, source)
                assert mine.tolist() == list(range(10))
                fresh.close()
                assert here.pinned_bytes == 0
            del source
            at_exit.append(lambda: asked and os._exit(2))
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert simulated.pinned_bytes == transfer.page_locked_bytes == 40
        transfer.copy(destination, source.fill_(3))
        assert set(destination.tolist()) == {3.0}
        del simulated.unregister_host_memory
        transfer.close()
        assert simulated.pinned_bytes == 0
        print("parent works")
    """)
    succeeds(done, "parent works\n")


def test_a_fork_while_another_thread_page_locks_does_not_hang():
    """The child's own transfers share what was locked in the parent at that moment."""
    done = run(
        """
        inside, leave = threading.Event(), threading.Event()
        register = simulated.register_host_memory
        def slow(address, num_bytes):
            inside.set()
            leave.wait(30)
            return register(address, num_bytes)
        simulated.register_host_memory = slow
        thread = threading.Thread(target=transfer.prepare, args=(source,))
        thread.start()
        inside.wait(30)
        child = os.fork()
        if child == 0:
            transfer.close()
            here = SimulatedAccelerator()
            fresh = PinnedDirectTransfer(accelerator=here, mapped=False)
            mine = here.device_empty(10, dtype=torch.bfloat16)
            fresh.prepare(source)
            fresh.copy(mine, source)
            fresh.close()
            os._exit(7 if mine.tolist() == list(range(10)) and here.pinned_bytes == 0 else 1)
        deadline = threading.Timer(20, os.kill, (child, 9))
        deadline.start()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        deadline.cancel()
        leave.set()
        thread.join(30)
        transfer.copy(destination, source)
        assert destination.tolist() == list(range(10))
    """,
        timeout=60,
    )
    succeeds(done)
