"""What one sees at a prompt: the names, what objects say of themselves, and the shortest ways to make them."""

import pickle
import pydoc

import pytest
import torch

import transfer
from accelerators import Capabilities
from transfer import ConfigError, StrategyStats, TransferConfig, TransferPolicy, build_transfer


@pytest.fixture
def pair(simulated):
    return simulated.device_empty(2**20, dtype=torch.bfloat16), torch.ones(2**20)


def test_a_transfer_says_what_it_is_what_it_has_done_and_what_it_holds(simulated, pair):
    made = build_transfer(accelerator=simulated, strategy="pinned_staged", pinned_staged={"buffers": 3})
    config = "TransferConfig(strategy='pinned_staged', pinned_staged=PinnedStagedConfig(buffers=3))"
    new = f"<RoutedTransfer: {config}, to simulated, 0 copies, 0 bytes, holds nothing>"
    assert repr(made) == new
    copy = made.submit(*pair)
    # Three buffers of 2^24 bf16 elements.
    assert repr(copy) == "<EventCopy: not waited for, 2 MiB to cpu>"
    copy.wait()
    assert repr(copy) == "<EventCopy: finished>"
    assert "1 copy, 2 MiB, host busy for " in repr(made)
    assert repr(made).endswith("GB/s, holds 96 MiB pinned>")
    made.close()
    assert repr(made).endswith("holds nothing, closed (a copy opens it again)>")
    made.copy(*pair)
    assert "closed" not in repr(made)
    made.close()


def test_a_repr_calls_no_accelerator():
    class Untouchable:
        name = "untouchable"

        def __getattr__(self, name):
            raise AssertionError(name)

    assert "to untouchable" in repr(transfer.PinnedDirectTransfer(accelerator=Untouchable()))
    assert "to the default" in repr(build_transfer({}))


def test_a_copy_that_still_reads_its_source_says_so(simulated, pair):
    with build_transfer({"pinned_direct": {"mapped": False}}, simulated) as made:
        made.prepare(pair[1])
        copy = made.submit(*pair)
        assert repr(copy) == "<EventCopy: not waited for, 2 MiB to cpu, reads its source>"
        copy.wait()
    with build_transfer({"verify": "full"}, simulated) as made:
        copy = made.submit(*pair)
        assert repr(copy).startswith("<VerifiedCopy: not compared, of <EventCopy: not waited for")
        copy.wait()
        assert repr(copy) == "<VerifiedCopy: compared, of <EventCopy: finished>>"
    assert repr(transfer.InFlightCopy()) == "<InFlightCopy: finished>"
    assert repr(type("Mine", (transfer.InFlightCopy,), {})()) == "<Mine>"


def test_counts_say_what_the_copies_cost():
    counts = StrategyStats(copies=3, bytes=6 * 10**9, wait_seconds=0.5, cast_seconds=0.25, read_seconds=0.25)
    assert counts.busy_seconds == 1.0
    assert counts.gigabytes_per_second == 6.0
    assert str(counts) == "3 copies, 5.588 GiB, host busy for 1 s: 6 GB/s"
    assert repr(counts) == f"<StrategyStats: {counts}>"
    assert StrategyStats(copies=1, bytes=2**20).gigabytes_per_second is None
    assert str(StrategyStats(copies=1, bytes=2**20, passed_on=2)) == "1 copy, 1 MiB, 2 passed on"
    assert pickle.loads(pickle.dumps(counts)) == counts


def test_a_decision_and_a_configuration_read_as_sentences(simulated, pair):
    decision = TransferPolicy({"strategy": "pageable"}, simulated).select(*pair)
    assert str(decision) == "pageable: The configuration says `strategy: pageable`."
    assert repr(TransferConfig()) == "TransferConfig()"
    assert repr(TransferConfig(fallback=False, nvme_swapped={"threads": 4})) == (
        "TransferConfig(fallback=False, nvme_swapped=NvmeSwappedConfig(threads=4))"
    )


def test_keys_may_be_given_by_name_in_place_of_a_configuration(monkeypatch, simulated):
    monkeypatch.setenv("H2D_CONFIG", "/nowhere/transfer.yaml")
    made = build_transfer(strategy="pinned_staged", fallback=False)
    assert made.config == TransferConfig(strategy="pinned_staged", fallback=False)
    with pytest.raises(ConfigError, match="give either config or the options strategy, not both"):
        build_transfer({}, strategy="pageable")
    with pytest.raises(ConfigError, match="unknown key 'strateg'. Did you mean 'strategy'"):
        build_transfer(strateg="pageable")


def test_the_face_is_small_and_its_help_short():
    assert len(dir(transfer)) <= 17
    assert set(dir(transfer)) - set(transfer.__all__) == {"__version__", "errors", "nvme", "testing", "zero3"}
    assert all(hasattr(transfer, name) for name in dir(transfer))
    # With every public name, and all of pydantic's methods, it was 7,591 lines.
    assert len(pydoc.plain(pydoc.render_doc(transfer)).splitlines()) < 1500


@pytest.mark.parametrize("name", ["streams", "events", "pins_host_memory", "registers_host_memory", "maps_host_memory"])
def test_what_an_accelerator_cannot_do_is_a_sentence(name):
    none = Capabilities(False, False, False, False, False)
    sentence = none.why_not(name)
    assert sentence.startswith(("This accelerator has no ", "This accelerator does not "))
    assert "_" not in sentence
    assert " no pins" not in sentence
