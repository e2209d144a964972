"""Which strategy is picked, and that the reason can be acted on."""

import functools
import importlib.metadata
import time
import timeit

import pytest
import torch

import accelerators
from accelerators import get_accelerator
from accelerators.simulated import SimulatedAccelerator
from transfer import (
    Decision,
    HostToDeviceTransfer,
    InFlightCopy,
    NotATensorError,
    PageableTransfer,
    PinnedDirectTransfer,
    PinnedStagedTransfer,
    StrategyRegistrationError,
    TransferError,
    TransferPolicy,
    UnknownStrategyError,
    build_transfer,
    get_strategy,
    register_strategy,
    strategy_names,
    unregister_strategy,
)
from transfer.nvme import swap_out

LARGE = 2**20
UNPREPARED = "The source is not page-locked: `prepare(source)` does that once, in place."
PREPARED = "The source is page-locked, so the device reads and casts it itself."


def pair(simulated, numel=LARGE, dtype=torch.bfloat16):
    return simulated.device_empty(numel, dtype=dtype), torch.zeros(numel)


def test_the_default_policy(simulated):
    policy = TransferPolicy({}, simulated)
    destination, source = pair(simulated)
    assert policy.select(destination, source) == Decision("pinned_staged", UNPREPARED)
    policy.strategy("pinned_direct").prepare(source)
    assert policy.select(destination, source) == Decision("pinned_direct", PREPARED)
    policy.strategy("pinned_direct").close()
    assert policy.select(source, source) == Decision("pageable", "The destination is not in the memory of simulated.")
    device_source = simulated.device_empty(LARGE, dtype=torch.float32)
    assert (
        policy.select(destination, device_source).reason
        == "The source is on the device, so this is a plain device copy."
    )


@pytest.mark.parametrize(("numel", "strategy"), [(2**19 - 1, "pageable"), (2**19, "pinned_staged")])
def test_small_copies_are_pageable(simulated, numel, strategy):
    # 2^19 bf16 elements are 1 MiB at the destination.
    decision = TransferPolicy({}, simulated).select(*pair(simulated, numel))
    assert decision.strategy == strategy
    if strategy == "pageable":
        assert decision.reason == "1024 KiB are too few to be staged (1 MiB would be enough)."


@pytest.fixture
def swapped(tmp_path):
    return swap_out(torch.arange(float(LARGE)), tmp_path)


@pytest.mark.parametrize("config", [{}, {"strategy": "pageable"}, {"strategy": "nvme_swapped"}])
def test_values_in_a_file_are_for_nvme_swapped(simulated, swapped, config):
    policy = TransferPolicy({**config, "rules": [{"when": {"at_least": 1}, "use": "pinned_staged"}]}, simulated)
    for destination in (pair(simulated)[0], torch.zeros(LARGE), simulated.device_empty(0, dtype=torch.float32)):
        decision = policy.select(destination, swapped)
        assert decision.strategy == "nvme_swapped"
    assert policy.preparing(swapped) == ()


def test_a_strategy_that_reads_files_too_may_be_asked_for(simulated, swapped):
    class Reads(PageableTransfer):
        reads_swapped = True

    register_strategy("reads", Reads)
    try:
        destination = pair(simulated)[0]
        rules = [{"when": {"destination_dtype": "bfloat16"}, "use": "reads"}]
        assert TransferPolicy({"rules": rules}, simulated).select(destination, swapped) == Decision(
            "reads", "rules[0] matches (destination_dtype: bfloat16)."
        )
        assert TransferPolicy({"strategy": "reads"}, simulated).select(destination, swapped).strategy == "reads"
        other = simulated.device_empty(LARGE, dtype=torch.float16)
        assert TransferPolicy({"rules": rules}, simulated).select(other, swapped).strategy == "nvme_swapped"
    finally:
        unregister_strategy("reads")


def test_with_nvme_swapped_as_the_strategy_tensors_go_by_the_default(simulated):
    rules = [{"when": {"at_least": 1}, "use": "nvme_swapped"}]
    policy = TransferPolicy({"strategy": "nvme_swapped", "rules": rules}, simulated)
    destination, source = pair(simulated)
    decision = policy.select(destination, source)
    assert decision.strategy == "pinned_staged"
    assert decision.reason.startswith("`strategy: nvme_swapped` is for values in files, and this source is in memory.")
    assert "pinned_direct" in policy.preparing(source)
    with build_transfer({"strategy": "nvme_swapped"}, simulated) as transfer:
        transfer.prepare(source)
        transfer.copy(destination, source + 3)
    assert (destination == 3).all()


def test_strategies_that_do_not_read_files_say_who_does(simulated, swapped):
    destination = simulated.device_empty(LARGE, dtype=torch.bfloat16).fill_(-1)
    for strategy in (PageableTransfer, PinnedStagedTransfer, PinnedDirectTransfer):
        with pytest.raises(NotATensorError, match="nvme_swapped.*build_transfer"):
            strategy(accelerator=simulated).submit(destination, swapped)
    assert (destination == -1).all()
    with build_transfer({"strategy": "pageable"}, simulated) as transfer:
        transfer.copy(destination, swapped)
    assert torch.equal(destination, torch.arange(float(LARGE)).bfloat16())


def test_what_an_accelerator_lacks_is_the_reason():
    for options, reason in (
        ({"streams": False}, "This simulated accelerator was made without streams."),
        ({"events": False}, "This simulated accelerator was made without events."),
    ):
        bare = SimulatedAccelerator(**options)
        assert TransferPolicy({}, bare).select(*pair(bare)) == Decision("pageable", reason)
    cpu = get_accelerator("cpu")
    decision = TransferPolicy({}, cpu).select(torch.zeros(LARGE, dtype=torch.bfloat16), torch.zeros(LARGE))
    assert decision == Decision(
        "pageable", "The CPU accelerator runs all work on the calling thread, so it has no streams."
    )


def test_a_pinned_source_goes_directly(simulated):
    policy = TransferPolicy({"pinned_direct": {"page_lock": False}}, simulated)
    pinned = simulated.pin_empty(LARGE, dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        assert policy.select(simulated.device_empty(LARGE, dtype=dtype), pinned).strategy == "pinned_direct"
        assert policy.select(simulated.device_empty(LARGE, dtype=dtype), pinned.clone()).strategy == "pinned_staged"
    destination = simulated.device_empty(LARGE, 2, dtype=torch.bfloat16)
    strided = simulated.pin_empty(2, LARGE, dtype=torch.float32).t()
    assert policy.select(destination, strided).strategy == "pinned_staged"


@pytest.mark.parametrize(("numel", "strategy"), [(2**18 - 1, "pageable"), (2**18, "pinned_direct")])
def test_small_copies_from_page_locked_memory(simulated, numel, strategy):
    """2^18 bf16 elements are 512 KiB, the threshold for them."""
    source = simulated.pin_empty(numel, dtype=torch.float32)
    decision = TransferPolicy({}, simulated).select(simulated.device_empty(numel, dtype=torch.bfloat16), source)
    assert decision.strategy == strategy


@pytest.mark.parametrize("fallback", [True, False])
def test_the_reason_is_that_of_the_row_before(simulated, fallback):
    destination, source = pair(simulated)
    for config, reason in [
        ({}, UNPREPARED),
        (
            {"pinned_direct": {"page_lock": False}},
            "The source is not page-locked, and `pinned_direct.page_lock` is false.",
        ),
    ]:
        policy = TransferPolicy({**config, "fallback": fallback}, simulated)
        assert policy.select(destination, source) == Decision("pinned_staged", reason)
    strided = torch.zeros(LARGE, 2)[:, 0]
    assert TransferPolicy({"fallback": fallback}, simulated).select(destination, strided) == Decision(
        "pinned_staged", "The source is not contiguous and aligned memory with the values themselves."
    )


def test_a_strategy_that_was_asked_for_and_cannot_is_named(simulated):
    destination, source = pair(simulated)
    decision = TransferPolicy({"strategy": "pinned_direct"}, simulated).select(destination, source)
    assert decision == Decision(
        "pinned_staged", f"`pinned_direct` cannot make this copy. {UNPREPARED}", "pinned_direct", True
    )
    bare = SimulatedAccelerator(events=False)
    for config in (
        {"strategy": "pinned_staged"},
        {"rules": [{"when": {"at_least": 1}, "use": "pinned_staged"}]},
    ):
        decision = TransferPolicy(config, bare).select(*pair(bare))
        why = "`pinned_staged` cannot make this copy. This simulated accelerator was made without events."
        assert decision == Decision("pageable", why, "pinned_staged", False)
        assert TransferPolicy({**config, "fallback": False}, bare).select(*pair(bare)).strategy == "pinned_staged"


def test_an_accelerator_whose_is_pinned_raises_is_asked_only_where_a_rule_needs_it():
    class Raises(SimulatedAccelerator):
        def is_pinned(self, tensor):
            raise RuntimeError("unknown pointer")

    broken = Raises()
    small = pair(broken, 100)
    assert TransferPolicy({}, broken).select(*small).strategy == "pageable"
    rule = {"when": {"source_pinned": True}, "use": "pageable"}
    with pytest.raises(RuntimeError, match="unknown pointer"):
        TransferPolicy({"rules": [rule]}, broken).select(*small)


def test_what_is_prepared_depends_on_what_may_be_chosen(simulated):
    large, small = torch.zeros(LARGE), torch.zeros(1000)
    assert TransferPolicy({}, simulated).preparing(large) == ("pinned_direct",)
    assert TransferPolicy({}, simulated).preparing(small) == ()
    assert TransferPolicy({}, simulated).preparing(simulated.device_empty(LARGE, dtype=torch.float32)) == ()
    assert TransferPolicy({"fallback": False}, simulated).preparing(large) == ("pinned_direct",)
    assert TransferPolicy({"strategy": "measured"}, simulated).preparing(large) == ("pinned_direct",)
    assert TransferPolicy({"strategy": "pinned_direct"}, simulated).preparing(small) == ("pinned_direct",)
    assert TransferPolicy({"strategy": "pageable"}, simulated).preparing(large) == ("pageable",)


@pytest.mark.parametrize(
    ("when", "prepared"),
    [
        ({"source_dtype": "float32"}, ("pinned_staged",)),  # takes every copy from there
        ({"source_dtype": "float16"}, ("pinned_direct",)),  # takes none
        ({"smaller_than": LARGE}, ("pinned_direct",)),  # no dtype is as small
        ({"at_least": LARGE}, ("pinned_staged",)),
        ({"smaller_than": 2 * LARGE}, ("pinned_direct", "pinned_staged")),  # known with the destination
        ({"destination_dtype": "float8_e5m2"}, ("pinned_direct", "pinned_staged")),
        ({"destination_dtype": "int32"}, ("pinned_direct",)),  # no copy goes there
        ({"source_pinned": True}, ("pinned_staged",)),
        ({"source_pinned": False}, ("pinned_direct",)),  # not when it is prepared
    ],
    ids=str,
)
def test_what_is_prepared_depends_on_when_a_rule_holds(simulated, when, prepared):
    rule = {"when": when, "use": "pinned_staged"}
    for strategy in (None, "pinned_direct"):
        policy = TransferPolicy({"strategy": strategy, "rules": [rule]}, simulated)
        assert policy.preparing(torch.zeros(LARGE)) == prepared


def test_a_rule_that_takes_every_copy_hides_those_after_it(simulated):
    rules = [{"when": {"at_least": 1}, "use": "pageable"}, {"when": {"at_least": 1}, "use": "pinned_direct"}]
    with build_transfer({"rules": rules}, simulated) as transfer:
        source = torch.zeros(LARGE)
        transfer.prepare(source)
        assert simulated.pinned_bytes == 0, "no copy takes `pinned_direct`"
        assert TransferPolicy({"rules": rules}, simulated).preparing(torch.zeros(9, dtype=torch.int64)) == ("pageable",)


def test_rules_come_first_and_in_order(simulated):
    config = {
        "strategy": "pinned_staged",
        "rules": [
            {"when": {"smaller_than": "1KiB"}, "use": "pageable"},
            {"when": {"at_least": "1MiB", "destination_dtype": "float16"}, "use": "pageable"},
            {"when": {"source_pinned": True}, "use": "pageable"},
        ],
    }
    policy = TransferPolicy(config, simulated)
    assert policy.select(*pair(simulated, 100)) == Decision("pageable", "rules[0] matches (smaller_than: 1 KiB).")
    assert policy.select(*pair(simulated, dtype=torch.float16)).reason == (
        "rules[1] matches (at_least: 1 MiB, destination_dtype: float16)."
    )
    assert policy.select(*pair(simulated, 1000)) == Decision(
        "pinned_staged", "The configuration says `strategy: pinned_staged`."
    )
    pinned = simulated.pin_empty(1000, dtype=torch.float32)
    assert policy.select(simulated.device_empty(1000, dtype=torch.bfloat16), pinned).strategy == "pageable"


def test_a_sub_group_that_moves_is_seen_where_it_is(simulated):
    """Partial offload: the decision follows the tensor at each call, never its identity or an index."""
    policy = TransferPolicy({}, simulated)
    destinations = [simulated.device_empty(LARGE, dtype=torch.bfloat16) for _ in range(10)]
    masters = [torch.zeros(LARGE) for _ in range(10)]
    on_device = simulated.device_empty(LARGE, dtype=torch.float32)
    on_host = masters[0].data
    masters[0].data = on_device
    picked = [policy.select(*both).strategy for both in zip(destinations, masters, strict=True)]
    assert picked == ["pageable"] + ["pinned_staged"] * 9
    masters[0].data = on_host
    assert policy.select(destinations[0], masters[0]).strategy == "pinned_staged"


def test_selecting_is_pure_and_takes_microseconds(simulated):
    policy = TransferPolicy({"rules": [{"when": {"smaller_than": 10}, "use": "pageable"}]}, simulated)
    destination, source = pair(simulated)
    before = (simulated.pinned_bytes, destination.clone().view(torch.int16).sum())
    select = functools.partial(policy.select, destination, source)
    each = min(timeit.repeat(select, timer=time.process_time, number=200, repeat=5)) / 200
    assert each < 200e-6  # measured: 10 us; the margin is for a busy machine
    assert (simulated.pinned_bytes, destination.view(torch.int16).sum()) == before


def test_building_calls_no_accelerator_and_the_first_copy_does():
    made = []

    def factory():
        made.append(SimulatedAccelerator())
        return made[-1]

    accelerators.register_accelerator("lazy", factory)
    try:
        transfer = build_transfer({"accelerator": "lazy", "strategy": "pinned_staged"})
        TransferPolicy({"accelerator": "lazy"})
        assert made == []
        transfer.copy(torch.empty(0), torch.empty(0))
        assert made == [], "nothing to copy needs no accelerator"
        with pytest.raises(TransferError):
            transfer.copy(torch.empty(1), torch.empty(2))
        transfer.copy(torch.zeros(2), torch.ones(2))
        assert len(made) == 1
        assert transfer.accelerator is made[0]
    finally:
        accelerators.unregister_accelerator("lazy")


def test_an_accelerator_that_is_not_there_is_one_clear_error(simulated):
    simulated.unavailable_reason = lambda: "No Acme card was found."
    with pytest.raises(RuntimeError, match=r"cannot transfer to simulated: No Acme card was found\.") as caught:
        build_transfer({}, simulated).copy(torch.zeros(2), torch.ones(2))
    assert isinstance(caught.value, TransferError)


@pytest.mark.parametrize("wrong", [object(), 7, SimulatedAccelerator])
def test_what_is_no_accelerator_is_refused_at_the_first_copy(wrong):
    for transfer in (PageableTransfer(accelerator=wrong), build_transfer({}, wrong)):
        with pytest.raises(TransferError, match="the accelerator given is"):
            transfer.copy(torch.zeros(2), torch.ones(2))


def test_deepspeed_failing_to_choose_is_one_of_our_errors(monkeypatch):
    import deepspeed.accelerator

    def refuse():
        raise ValueError("DS_ACCELERATOR must be one of ...")

    monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", refuse)
    with pytest.raises(TransferError, match="DeepSpeed cannot choose an accelerator here: DS_ACCELERATOR must be"):
        build_transfer({}).copy(torch.zeros(2), torch.ones(2))


def test_errors_of_accelerators_reach_the_caller_as_transfer_errors():
    def broken():
        raise OSError("no driver")

    accelerators.register_accelerator("broken", broken)
    try:
        for use in (
            lambda *tensors: build_transfer({"accelerator": "broken"}).copy(*tensors),
            lambda *tensors: TransferPolicy({"accelerator": "broken"}).select(*tensors),
        ):
            with pytest.raises(TransferError, match="'broken'.*no driver") as caught:
                use(torch.zeros(2), torch.ones(2))
            assert isinstance(caught.value.__cause__, accelerators.AcceleratorError)
    finally:
        accelerators.unregister_accelerator("broken")


class Lost(accelerators.AcceleratorError):
    """What a vendor's accelerator may raise anywhere."""


class Mine(PageableTransfer):
    """Counts what it was given."""

    submitted = 0

    def _submit(self, destination, source):
        type(self).submitted += 1
        return super()._submit(destination, source)


class Plain(HostToDeviceTransfer):
    """As small as a strategy gets; its own ``__init__`` knows nothing of ours."""

    def __init__(self):
        self.numels = []

    def _submit(self, destination, source):
        self.numels.append(destination.numel())
        self.accelerator.enqueue_copy(destination, source)
        return InFlightCopy()


class Asking(PageableTransfer):
    """Asks the accelerator in each method that a strategy may write itself."""

    def why_not(self, destination, source):
        return None if self.accelerator.on_host(source) else "It is no source."

    def prepare(self, source):
        self.accelerator.is_pinned(source)

    def unprepare(self, source):
        self.accelerator.is_pinned(source)

    def drain(self):
        self.accelerator.synchronize()

    def close(self):
        self.accelerator.synchronize()


class Losing(SimulatedAccelerator):
    """Its card may fall out."""

    lost = False

    def check(self):
        if self.lost:
            raise Lost("the card fell out")

    def on_host(self, tensor):
        self.check()
        return super().on_host(tensor)

    def on_device(self, tensor):
        self.check()
        return super().on_device(tensor)

    def is_pinned(self, tensor):
        self.check()
        return super().is_pinned(tensor)

    def synchronize(self, device_index=None):
        self.check()
        super().synchronize(device_index)


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (make, use)
        for make, uses in (
            (build_transfer, ("prepare", "select", "preparing", "is_host_to_device", "drain")),
            (PinnedDirectTransfer, ("why_not", "prepare", "is_host_to_device", "drain")),
            (Asking, ("why_not", "prepare", "unprepare", "is_host_to_device", "drain", "close")),
        )
        for use in uses
    ],
)
def test_an_error_of_accelerators_leaves_as_ours_wherever_it_is_raised(make, use):
    accelerator = Losing()
    destination, source = (
        accelerator.device_empty(LARGE, dtype=torch.bfloat16),
        accelerator.pin_empty(LARGE, dtype=torch.float32),
    )
    transfer = make({}, accelerator)
    transfer.copy(destination, source)
    arguments = {"prepare": (source,), "unprepare": (source,), "preparing": (source,), "drain": (), "close": ()}
    accelerator.lost = True
    with pytest.raises(TransferError, match="^the card fell out$") as caught:
        getattr(transfer.policy if use in ("select", "preparing") else transfer, use)(
            *arguments.get(use, (destination, source))
        )
    assert isinstance(caught.value.__cause__, Lost)
    accelerator.lost = False
    transfer.close()


def test_a_strategy_that_leaves_out_our_init_works(simulated):
    accelerators.set_accelerator(simulated)
    try:
        destination, source = pair(simulated, 8)
        with Plain() as transfer:
            transfer.copy(destination, source + 2)
        assert transfer.numels == [8]
        assert destination.tolist() == [2.0] * 8
    finally:
        accelerators.set_accelerator(None)


def test_every_strategy_is_closed_although_one_fails(simulated):
    transfer = build_transfer({}, simulated)
    for numel in (4, LARGE):
        transfer.copy(*pair(simulated, numel))
    transfer.policy.strategy("pageable").close = lambda: (_ for _ in ()).throw(RuntimeError("lost"))
    assert simulated.pinned_bytes == 2**26
    with pytest.raises(RuntimeError, match="lost"):
        transfer.close()
    assert simulated.pinned_bytes == 0


def test_a_registered_strategy_can_be_chosen_by_name(simulated):
    register_strategy("mine", Mine)
    try:
        assert "mine" in strategy_names()
        destination, source = pair(simulated, 8)
        with build_transfer({"strategy": "mine"}, simulated) as transfer:
            transfer.copy(destination, source + 3)
        assert Mine.submitted == 1
        assert destination.tolist() == [3.0] * 8
        with pytest.raises(StrategyRegistrationError, match="'mine' is registered already"):
            register_strategy("mine", Mine)
    finally:
        unregister_strategy("mine")
    with pytest.raises(UnknownStrategyError, match="unknown strategy 'mine'"):
        get_strategy("mine")


def test_a_strategy_from_an_entry_point(tmp_path, monkeypatch, simulated):
    info = tmp_path / "swift-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: swift\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[transfer.strategies]\nswift = swift_h2d:Swift\nwrong = swift_h2d:torch\n")
    (tmp_path / "swift_h2d.py").write_text(
        "import torch\nfrom transfer import PageableTransfer\nclass Swift(PageableTransfer):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    destination, source = pair(simulated, 8)
    build_transfer({"strategy": "swift", "swift": {}}, simulated).copy(destination, source + 1)
    assert destination.tolist() == [1.0] * 8
    with pytest.raises(StrategyRegistrationError, match="'wrong': .* is not a subclass of HostToDeviceTransfer"):
        get_strategy("wrong")


def test_plug_ins_are_not_looked_for_again_while_none_is_installed(monkeypatch):
    searches = []

    def entry_points(**group):
        searches.append(group)
        return find(**group)

    find = importlib.metadata.entry_points
    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    for _ in range(3):
        with build_transfer({"accelerator": "simulated", "strategy": "pinned_direct"}):
            pass
    assert sorted(group["group"] for group in searches) == ["transfer.accelerators", "transfer.strategies"]


class Unfinished(HostToDeviceTransfer):
    pass


@pytest.mark.parametrize(
    ("name", "strategy", "message"),
    [
        ("mine", object, "is not a subclass of HostToDeviceTransfer"),
        ("mine", Mine(), "is not a subclass of HostToDeviceTransfer"),
        ("mine", Unfinished, "Unfinished does not define _submit"),
        ("My Own", Mine, "lower-case identifier"),
        ("fallback", Mine, "it has a meaning of its own in the configuration"),
        ("pageable", Mine, "'pageable' is registered already"),
    ],
)
def test_wrong_registrations_are_refused(name, strategy, message):
    before = strategy_names()
    with pytest.raises(StrategyRegistrationError, match=message):
        register_strategy(name, strategy)
    assert strategy_names() == before


def test_every_shipped_strategy_is_registered():
    import transfer.strategies

    def subclasses(of):
        for cls in of.__subclasses__():
            yield cls
            yield from subclasses(cls)

    shipped = {
        cls
        for cls in subclasses(HostToDeviceTransfer)
        if cls.__module__.startswith("transfer.strategies.") and not cls.__abstractmethods__
    }
    assert shipped == {get_strategy(name) for name in strategy_names()}
    assert transfer.strategies.PinnedStagedTransfer in shipped


def test_decisions_are_logged_once(simulated, caplog):
    caplog.set_level("INFO", logger="transfer")
    with build_transfer({}, simulated) as transfer:
        for _ in range(3):
            transfer.copy(*pair(simulated, 4))
            transfer.copy(*pair(simulated))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["pageable", "pinned_staged"]
    with build_transfer({"rules": [{"when": {"smaller_than": 100}, "use": "pageable"}]}, simulated) as transfer:
        transfer.copy(*pair(simulated, 4))
        transfer.copy(*pair(simulated, 400))
    assert "rules[0]" in caplog.records[-2].getMessage()
    assert "too few" in caplog.records[-1].getMessage()
