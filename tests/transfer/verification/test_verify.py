"""``verify``: wrong values are found, right ones are not called wrong, and nothing else changes."""

import gc
import itertools
import pickle
import random
import sys

import numpy as np
import pytest
import torch

from accelerators.simulated import SimulatedAccelerator
from accelerators.testing import ANY_METHOD, bits, failing
from tests.running import run_threads
from transfer import ConfigError, TransferConfig, TransferError, VerificationError, build_transfer, load_config, nvme
from transfer.memory.staging_ring import StagingBuffer

BF16 = torch.bfloat16
MODES = pytest.mark.parametrize("mode", ["sample", "full"])
#: Elements of bf16 of which a sample has a tenth: 2550 rows of 16, of which 255 fit.
TENFOLD = 40_800
SMALL_CHUNKS = {"pinned_staged": {"chunk_elements": 1000}, "pinned_direct": {"chunk_elements": 1000, "mapped": False}}


def verified(simulated, mode, strategy=None, **config):
    asked = {} if strategy is None else {"strategy": strategy}
    return build_transfer({"verify": mode, **asked, **SMALL_CHUNKS, **config}, simulated)


def values(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def attempt(transfer, destination, source):
    try:
        transfer.copy(destination, source)
    except VerificationError as error:
        return error
    return None


def fails(transfer, destination, source):
    with pytest.raises(VerificationError) as caught:
        transfer.copy(destination, source)
    return caught.value


# --- What is found


@pytest.mark.parametrize("bit", range(15))
def test_full_finds_each_bit(simulated, wrong, bit):
    transfer = verified(simulated, "full", "flips")
    destination, source = simulated.device_empty(3000, dtype=BF16), values(3000)
    wrong.flips(1234, bit=bit)
    error = fails(transfer, destination, source)
    assert (error.first, error.last, error.wrong, error.compared) == (1234, 1234, 1, 3000)


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 4096])
def test_a_sample_of_a_small_copy_is_all_of_it(simulated, wrong, numel):
    transfer = verified(simulated, "sample", "flips")
    destination, source = simulated.device_empty(numel, dtype=BF16), values(numel)
    for index in {0, numel // 2, numel - 1}:
        wrong.flips(index)
        if numel < 4096:
            assert fails(transfer, destination, source).first == index
    wrong.flips()
    transfer.copy(destination, source)


@pytest.mark.slow
def test_a_sample_finds_one_wrong_element_as_often_as_is_said(simulated, wrong):
    transfer = verified(simulated, "sample", "flips")
    transfer.verifier.seed = 7  # of 400 copies, 40 would be found on average, and 15 or 65 in none of 100,000 runs
    destination, source = simulated.device_empty(TENFOLD, dtype=BF16), values(TENFOLD)
    for index in (0, 20_407, TENFOLD - 1):
        wrong.flips(index)
        found = [error for error in (attempt(transfer, destination, source) for _ in range(400)) if error is not None]
        assert 15 < len(found) < 65
        assert {(each.first, each.last, each.wrong, each.compared) for each in found} == {(index, index, 1, 4080)}


def test_a_sample_finds_a_wrong_stretch_always(simulated, wrong):
    """Rows of 16 elements begin every 160 elements, so that none of 175 is without one."""
    transfer = verified(simulated, "sample", "flips")
    destination, source = simulated.device_empty(TENFOLD, dtype=BF16), values(TENFOLD)
    for begin in (0, 1003, TENFOLD - 175):
        wrong.flips(*range(begin, begin + 175))
        for _ in range(20):
            error = fails(transfer, destination, source)
            assert begin <= error.first <= error.last < begin + 175
            assert 16 <= error.wrong <= 32


def test_a_sample_always_has_the_elements_behind_the_last_row(simulated, wrong):
    transfer = verified(simulated, "sample", "flips")
    numel = TENFOLD + 5
    destination, source = simulated.device_empty(numel, dtype=BF16), values(numel)
    wrong.flips(numel - 1)
    for _ in range(20):
        assert fails(transfer, destination, source).first == numel - 1


def test_other_elements_in_each_copy_and_the_same_ones_with_the_same_seed(simulated, wrong):
    wrong.flips(*range(TENFOLD))

    def firsts(seed):
        transfer = verified(simulated, "sample", "flips")
        transfer.verifier.seed = seed
        destination, source = simulated.device_empty(TENFOLD, dtype=BF16), values(TENFOLD)
        errors = [fails(transfer, destination, source) for _ in range(12)]
        assert [(each.seed, each.copy) for each in errors] == [(seed, number) for number in range(1, 13)]
        return [each.first for each in errors]

    assert len(set(firsts(1))) > 3
    assert firsts(1) == firsts(1) != firsts(2)


def test_two_transfers_do_not_compare_the_same_elements(simulated):
    assert len({verified(simulated, "sample").verifier.seed for _ in range(8)}) > 1


@MODES
def test_a_forgotten_wait_is_found(simulated, wrong, mode):
    """From pinned memory of the same dtype: else the copy itself blocks, and there is no wait to forget."""
    transfer = verified(simulated, mode, "forgets")
    source = simulated.pin_empty(3000, dtype=BF16)
    source.copy_(values(3000))
    destination = simulated.device_empty(3000, dtype=BF16).fill_(-1)
    assert fails(transfer, destination, source).wrong > 100


@MODES
def test_a_staging_buffer_that_is_reused_too_early_is_found(simulated, mode, monkeypatch):
    monkeypatch.setattr(StagingBuffer, "reclaim", lambda buffer: buffer.guard())
    transfer = verified(simulated, mode, "pinned_staged")
    destination = simulated.device_empty(TENFOLD, dtype=BF16)
    assert fails(transfer, destination, values(TENFOLD)).wrong > 1000


@MODES
@pytest.mark.parametrize("transposed", ["destination", "source"])
def test_any_strides(simulated, wrong, mode, transposed):
    transfer = verified(simulated, mode, "flips")
    destination, source = simulated.device_empty(60, 50, dtype=torch.float32), values(3000).view(60, 50)
    if transposed == "destination":
        destination = simulated.device_empty(50, 60, dtype=torch.float32).t()
    else:
        source = values(3000).view(50, 60).t()
    transfer.copy(destination, source)
    wrong.flips(*range(3000))
    error = fails(transfer, destination, source)
    at = divmod(error.first, 50)
    assert error.expected.startswith(repr(source[at].item()))
    assert error.found.startswith(repr(destination[at].item()))
    if mode == "full":
        assert (error.first, error.last, error.wrong) == (0, 2999, 3000)


@MODES
@pytest.mark.parametrize("columns", [1, 7])
def test_values_in_a_file(simulated, wrong, mode, columns, tmp_path):
    """To a destination with gaps, from behind a header of another program."""
    source = values(21_000).view(-1, columns)
    (tmp_path / "file").write_bytes(b"header: 24 bytes long :-)"[:24] + source.numpy().tobytes())
    swapped = nvme.SwappedTensor.from_file(tmp_path / "file", torch.float32, tuple(source.shape), 24)
    destination = simulated.device_empty(len(source), 10, dtype=BF16)[:, :columns]
    right = verified(simulated, mode, nvme_swapped={"chunk_elements": 1024, "threads": 2})
    right.copy(destination, swapped)
    assert torch.equal(destination, source.bfloat16())
    transfer = verified(simulated, mode, "flips")
    transfer.copy(destination, swapped)
    wrong.flips(*range(21_000))
    error = fails(transfer, destination, swapped)
    assert error.expected.startswith(repr(source.bfloat16().view(-1)[error.first].item()))
    wrong.flips(17)
    if mode == "full":
        assert fails(transfer, destination, swapped).first == 17


@MODES
@pytest.mark.parametrize("numel", [1, 5, 100_000])
def test_all_dtypes(simulated, wrong, mode, numel):
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.int8,
        torch.bool,
    ):
        source = (values(numel) * 100).to(dtype)
        destination = simulated.device_empty(numel, dtype=dtype)
        transfer = verified(simulated, mode)
        transfer.copy(destination, source)
        assert torch.equal(bits(destination), bits(source))
    for dtype in (torch.complex64, torch.complex128):
        source = torch.complex(values(numel), values(numel, 1)).to(dtype)
        destination = simulated.device_empty(numel, dtype=dtype)
        verified(simulated, mode).copy(destination, source.conj())
        assert torch.equal(destination, source.conj().resolve_conj())
    source = torch._neg_view(values(numel))
    destination = simulated.device_empty(numel, dtype=BF16)
    verified(simulated, mode).copy(destination, source)
    assert torch.equal(destination, source.resolve_neg().bfloat16())


@MODES
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_nan_may_have_any_payload_and_must_be_one(simulated, wrong, mode, dtype):
    source = values(1000)
    source[[0, 500, 999]] = float("nan")
    destination = simulated.device_empty(1000, dtype=dtype)
    transfer = verified(simulated, mode, "nans")
    transfer.copy(destination, source)
    assert destination[500].isnan()
    wrong.nans_become(1.0)
    error = fails(transfer, destination, source)
    assert (error.first, error.last, error.wrong) == (0, 999, 3)
    assert error.expected.startswith("nan (0x")
    assert error.found.startswith("1.0 (0x3")


@MODES
def test_the_two_zeros_differ(simulated, wrong, mode):
    source = torch.zeros(100)
    source[3] = -0.0
    transfer = verified(simulated, mode, "zeros")
    error = fails(transfer, simulated.device_empty(100, dtype=torch.float32), source)
    assert (error.expected, error.found) == ("-0.0 (0x80000000)", "0.0 (0x00000000)")
    assert (error.first, error.wrong) == (3, 1)


# --- What is not called wrong


@MODES
@pytest.mark.parametrize("strategy", ["pageable", "pinned_staged", "pinned_direct"])
def test_a_source_that_changes_when_it_may(simulated, mode, strategy):
    transfer = verified(simulated, mode, strategy)
    source = values(TENFOLD)
    transfer.prepare(source)
    destination = simulated.device_empty(TENFOLD, dtype=BF16)
    for _ in range(3):
        right = source.bfloat16()
        copy = transfer.submit(destination, source)
        copy.release_source()
        source.copy_(values(TENFOLD, seed=5))
        copy.wait()
        assert torch.equal(destination, right)
    transfer.close()


@MODES
@pytest.mark.parametrize("how", ["wait", "done", "order_after"])
def test_a_destination_that_changes_when_it_may(simulated, mode, how):
    transfer = verified(simulated, mode, "pinned_staged")
    destination = simulated.device_empty(TENFOLD, dtype=BF16)
    others = simulated.device_empty(TENFOLD, dtype=BF16).fill_(9)
    stream = simulated.Stream()
    for _ in range(3):
        copy = transfer.submit(destination, values(TENFOLD))
        if how == "wait":
            copy.wait()
        elif how == "done":
            assert any(copy.done for _ in range(10_000))
        else:
            copy.order_after(stream)
        with simulated.stream(stream):
            simulated.enqueue_copy(destination, others)
        stream.synchronize()
        assert (destination == 9).all()
        copy.wait()
        assert copy.done


def test_order_after_does_not_block_with_a_sample(simulated):
    transfer = verified(simulated, "sample", "pinned_staged")
    destination = simulated.device_empty(1000, dtype=BF16).fill_(-1)
    copy = transfer.submit(destination, values(1000))
    copy.order_after(simulated.Stream())
    assert (destination == -1).all()
    copy.wait()


@pytest.mark.parametrize("strategy", ["pinned_staged", "pinned_direct"])
def test_a_sample_waits_for_nothing(simulated, strategy):
    transfer = verified(simulated, "sample", strategy)
    source = values(900)
    transfer.prepare(source)
    destination = simulated.device_empty(900, dtype=BF16).fill_(-1)
    copy = transfer.submit(destination, source)
    assert (destination == -1).all(), "submitted, and not waited for"
    copy.wait()
    assert torch.equal(destination, source.bfloat16())
    transfer.close()


@MODES
def test_copies_that_are_dropped(simulated, mode):
    transfer = verified(simulated, mode, "pinned_staged")
    for _ in range(300):
        transfer.submit(simulated.device_empty(100, dtype=BF16), values(100))
    transfer.close()
    assert simulated.pinned_bytes == 0


def test_more_copies_in_flight_than_there_are_slots(simulated, wrong):
    transfer = verified(simulated, "sample", "pinned_staged")
    sources = [values(200, seed) for seed in range(300)]
    destinations = [simulated.device_empty(200, dtype=BF16) for _ in sources]
    copies = [transfer.submit(*pair) for pair in zip(destinations, sources, strict=True)]
    transfer.close()
    assert simulated.pinned_bytes == 0
    for destination in destinations:
        destination.zero_()  # what the samples hold was read before
    for copy in copies:
        copy.wait()


@MODES
def test_within_the_host_and_within_the_device(simulated, wrong, mode):
    transfer = verified(simulated, mode)
    here, there = torch.zeros(1000), simulated.device_empty(1000, dtype=torch.float32).fill_(4)
    transfer.copy(here, values(1000))
    assert torch.equal(here, values(1000))
    transfer.copy(here, there)
    assert (here == 4).all()
    transfer.copy(simulated.device_empty(1000, dtype=BF16), there)


@MODES
@pytest.mark.parametrize("lacks", ["streams", "events"])
def test_accelerators_that_lack_something(wrong, mode, lacks):
    simulated = SimulatedAccelerator(**{lacks: False})
    destination = simulated.device_empty(3000, dtype=BF16)
    transfer = verified(simulated, mode)
    transfer.copy(destination, values(3000))
    assert torch.equal(destination, values(3000).bfloat16())
    wrong.flips(*range(3000))
    fails(verified(simulated, mode, "flips"), destination, values(3000))


@pytest.mark.parametrize("limit", [0, 2**20 - 1])
def test_a_sample_without_pinned_memory(wrong, limit):
    simulated = SimulatedAccelerator(pin_limit_bytes=limit)
    destination = simulated.device_empty(1000, dtype=BF16)
    wrong.flips(999)
    transfer = verified(simulated, "sample", "flips")
    for _ in range(2):
        assert fails(transfer, destination, values(1000)).first == 999
    assert transfer.pinned_bytes == simulated.pinned_bytes == 0


# --- The error


@MODES
def test_what_the_error_says(simulated, wrong, mode):
    transfer = verified(simulated, mode, "flips")
    wrong.flips(2, 5, 700)
    source = torch.ones(1000)
    error = fails(transfer, simulated.device_empty(1000, dtype=BF16), source)
    assert isinstance(error, TransferError)
    assert isinstance(error, RuntimeError)
    assert str(error) == (
        "a copy to torch.bfloat16 (1000,) on cpu left wrong values: element 2 is 1.0078125 (0x3f81) and must be 1.0 "
        "(0x3f80). 3 of 1000 compared elements are wrong, from 2 to 700. The destination keeps them; the source was "
        f"only read (verify: {mode}, seed {transfer.verifier.seed}, copy 1)"
    )
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.first, again.sub_group) == (str(error), 2, None)
    assert (source == 1).all()


@MODES
def test_it_is_raised_once_and_the_next_copy_is_right(simulated, wrong, mode):
    transfer = verified(simulated, mode, "flips")
    destination = simulated.device_empty(1000, dtype=BF16)
    wrong.flips(10)
    copy = transfer.submit(destination, values(1000))
    with pytest.raises(VerificationError):
        copy.wait()
    copy.wait()
    assert copy.done
    wrong.flips()
    transfer.copy(destination, values(1000))
    assert torch.equal(destination, values(1000).bfloat16())
    transfer.close()
    assert simulated.pinned_bytes == 0


@MODES
def test_done_raises_it_too(simulated, wrong, mode):
    transfer = verified(simulated, mode, "flips")
    wrong.flips(10)
    copy = transfer.submit(simulated.device_empty(1000, dtype=BF16), values(1000))
    with pytest.raises(VerificationError):
        for _ in range(1000):
            assert not copy.done


# --- What it costs, and leaves alone


def test_no_random_numbers_of_others_are_drawn(simulated):
    def state():
        return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()

    for mode in ("sample", "full"):
        before = state()
        transfer = verified(simulated, mode, "pinned_staged")
        transfer.copy(simulated.device_empty(TENFOLD, dtype=BF16), torch.ones(TENFOLD))
        transfer.close()
        assert state() == before


def calls_of_a_copy(simulated, mode, numel=TENFOLD):
    """The calls on the accelerator, and the bytes that come back from it."""
    config = {} if mode is None else {"verify": mode}
    transfer = build_transfer({"strategy": "pageable", **config}, simulated)
    destination, source = simulated.device_empty(numel, dtype=BF16), values(numel)
    transfer.copy(destination, source)  # pins
    read, enqueue = [], simulated.enqueue_copy
    simulated.enqueue_copy = lambda to, of: (read.append(to.nbytes * simulated.on_host(to)), enqueue(to, of))[1]
    with failing(simulated, ANY_METHOD, AssertionError(), after=10**9) as calls:
        transfer.copy(destination, source)
    simulated.enqueue_copy = enqueue
    transfer.close()
    return calls, sum(read)


def test_what_a_copy_costs(simulated):
    plain, read = calls_of_a_copy(simulated, None)
    assert read == 0
    assert calls_of_a_copy(simulated, "off") == (plain, 0)
    calls, read = calls_of_a_copy(simulated, "sample")
    assert read == 8160, "4080 elements of bf16"
    assert calls.count("enqueue_copy") == plain.count("enqueue_copy") + 1, "one gather"
    assert len(calls) <= len(plain) + 8
    assert calls_of_a_copy(simulated, "full")[1] == 2 * TENFOLD


def test_off_runs_none_of_its_code(simulated):
    def modules(mode):
        seen = set()
        transfer = build_transfer({} if mode is None else {"verify": mode}, simulated)
        destination, source = simulated.device_empty(1000, dtype=BF16), values(1000)
        frames = itertools.count()

        def note(frame, event, _argument):
            if event == "call":
                next(frames)
                seen.add(frame.f_globals.get("__name__", ""))

        sys.setprofile(note)
        try:
            transfer.copy(destination, source)
        finally:
            sys.setprofile(None)
        return any("verification" in each for each in seen), next(frames)

    first, again = modules(None), modules("off")
    assert first == again
    assert not first[0]
    assert modules("sample")[0], "else this test sees nothing"


def test_pinned_memory_is_a_mebibyte_and_given_back(simulated):
    transfer = verified(simulated, "sample", "pageable")
    assert transfer.pinned_bytes == 0, "nothing before the first copy"
    for numel in (10, 1000, TENFOLD):
        transfer.copy(simulated.device_empty(numel, dtype=BF16), values(numel))
        assert transfer.pinned_bytes == simulated.pinned_bytes == 2**20
    transfer.close()
    transfer.close()
    assert transfer.pinned_bytes == simulated.pinned_bytes == 0
    transfer.copy(simulated.device_empty(10, dtype=BF16), values(10))
    del transfer
    gc.collect()
    assert simulated.pinned_bytes == 0, "dropped, and not closed"


def test_full_pins_nothing(simulated):
    transfer = verified(simulated, "full", "pageable")
    transfer.copy(simulated.device_empty(1000, dtype=BF16), values(1000))
    assert simulated.pinned_bytes == 0


@pytest.mark.slow
@MODES
def test_threads_share_one_transfer(simulated, mode):
    transfer = verified(simulated, mode, "pinned_staged")
    errors = []

    def work(seed):
        try:
            source = values(700, seed)
            for _ in range(60):
                destinations = [simulated.device_empty(700, dtype=BF16) for _ in range(4)]
                copies = [transfer.submit(each, source) for each in destinations]
                for copy, destination in zip(copies, destinations, strict=True):
                    copy.wait()
                    assert torch.equal(destination, source.bfloat16())
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    run_threads(work, range(4))
    assert errors == []
    transfer.close()
    assert simulated.pinned_bytes == 0


# --- The configuration


@pytest.mark.parametrize("word", ["off", "sample", "full", "Off", "OFF"])
def test_the_configuration(tmp_path, word):
    (tmp_path / "h2d.yaml").write_text(f"transfer: {{verify: {word}}}")
    if word in ("Off", "OFF"):
        with pytest.raises(ConfigError, match=f"found '{word}' .*: expected off, sample or full"):
            load_config(tmp_path / "h2d.yaml")
    else:
        assert load_config(tmp_path / "h2d.yaml").verify == word
        assert TransferConfig(verify=word).verify == word
    assert TransferConfig().verify == "off"


@pytest.mark.parametrize("value", [False, True, None, 0, "samples", "on"])
def test_other_values_are_refused(value):
    with pytest.raises(ConfigError, match="verify: .*expected off, sample or full"):
        TransferConfig(verify=value)
