"""DeepSpeed's accelerators, of every version since 0.16, as the protocol sees them."""

import types

import pytest
import torch

from accelerators import InvalidAcceleratorError, get_accelerator
from accelerators.cpu import CpuAccelerator
from accelerators.cuda import CudaAccelerator
from accelerators.deepspeed_adapter import DeepSpeedAdapter, adapt
from accelerators.mps import MpsAccelerator
from accelerators.protocol import check_accelerator
from accelerators.simulated import SimulatedAccelerator
from transfer import build_transfer


class Old:
    """What the adapter may rely on before DeepSpeed 0.19.6: no pin_empty, unpin_memory, register_host_memory."""

    _name = "xpu"
    Event = Stream = None

    def __init__(self):
        self.calls = []

    def is_available(self):
        return True

    def pin_memory(self, tensor, align_bytes=1):
        self.calls.append((tuple(tensor.shape), tensor.dtype, align_bytes))
        return tensor

    def is_pinned(self, tensor):
        return True

    def current_stream(self, device_index=None):
        return None

    def synchronize(self, device_index=None):
        self.calls.append("synchronize")

    def on_accelerator(self, tensor):
        return tensor.device.type == "xpu"

    def current_device_name(self):
        return "cpu"


class New(Old):
    """And since 0.19.7."""

    def pin_empty(self, *size, dtype, device="cpu"):
        self.calls.append(("pin_empty", size, dtype, device))
        return torch.empty(size, dtype=dtype)

    def unpin_memory(self, tensor):
        return True

    def register_host_memory(self, address, num_bytes):
        self.calls.append((address, num_bytes))
        return True

    def unregister_host_memory(self, address):
        self.calls.append(address)


def test_before_pin_empty_a_fresh_tensor_is_pinned():
    old = Old()
    pinned = DeepSpeedAdapter(old).pin_empty(6, dtype=torch.bfloat16)
    assert old.calls == [((6,), torch.bfloat16, 1)]
    assert pinned.shape == (6,)


def test_pin_empty_is_used_where_it_exists():
    new = New()
    DeepSpeedAdapter(new).pin_empty(2, 3, dtype=torch.float16)
    assert new.calls == [("pin_empty", (2, 3), torch.float16, "cpu")]


def test_what_an_old_deepspeed_lacks_is_reported_not_called():
    adapter = DeepSpeedAdapter(Old())
    assert adapter.unpin_memory(torch.zeros(1)) is None
    assert not adapter.capabilities.registers_host_memory
    assert adapter.register_host_memory(0, 8) is False
    assert adapter.unregister_host_memory(0) is None


def test_registering_goes_through_where_a_backend_has_it():
    new = New()
    adapter = DeepSpeedAdapter(new)
    assert adapter.capabilities.registers_host_memory
    assert adapter.register_host_memory(4096, 100) is True
    adapter.unregister_host_memory(4096)
    assert new.calls == [(4096, 100), 4096]


@pytest.mark.parametrize("deepspeeds", [Old, New])
def test_the_general_adapter_has_the_whole_protocol(deepspeeds):
    adapter = DeepSpeedAdapter(deepspeeds())
    check_accelerator(adapter, "test")
    assert adapter.name == "xpu"
    assert adapter.capabilities.why_not("streams") == "DeepSpeed's xpu accelerator has no streams."
    with adapter.stream(None):
        adapter.synchronize()


def test_an_unavailable_backend_says_so_in_one_sentence():
    absent, broken = Old(), Old()
    absent.is_available = lambda: False
    broken.is_available = lambda: torch.no_such_backend.is_available()
    assert DeepSpeedAdapter(absent).unavailable_reason().startswith("The xpu accelerator is not available to torch")
    assert "no_such_backend" in DeepSpeedAdapter(broken).unavailable_reason()


def test_mps_says_everything_is_pinned_and_is_not_believed():
    mps = New()
    mps._name, mps.Event = "mps", object
    adapter = adapt(mps)
    assert isinstance(adapter, MpsAccelerator)
    assert mps.is_pinned(torch.zeros(4)) is True
    assert adapter.is_pinned(torch.zeros(4)) is False
    assert not adapter.capabilities.pins_host_memory
    assert not adapter.capabilities.copies_asynchronously
    assert adapter.capabilities.events


def test_cpu_has_no_streams_events_or_pinning_and_says_why():
    cpu = get_accelerator("cpu")
    assert isinstance(cpu, CpuAccelerator)
    assert cpu.Stream is None
    assert cpu.Event is None
    for name in ("streams", "events", "pins_host_memory", "registers_host_memory", "copies_asynchronously"):
        assert "CPU accelerator" in cpu.capabilities.why_not(name)
    assert cpu.on_host(torch.zeros(1))
    assert cpu.on_device(torch.zeros(1))


def test_cuda_without_a_gpu_says_why():
    if torch.cuda.is_available():
        assert get_accelerator("cuda").unavailable_reason() is None
        return
    cuda = get_accelerator("cuda")
    assert isinstance(cuda, CudaAccelerator)
    assert cuda.unavailable_reason().startswith("CUDA is not available: ")


def test_the_default_follows_deepspeeds_choice(monkeypatch):
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    first, second = CPU_Accelerator(), SimulatedAccelerator()
    monkeypatch.setattr(real_accelerator, "ds_accelerator", first)
    adapted = get_accelerator()
    assert adapted is get_accelerator()
    assert isinstance(adapted, CpuAccelerator)
    monkeypatch.setattr(real_accelerator, "ds_accelerator", second.as_deepspeed())
    assert get_accelerator() is second


def test_what_a_deepspeed_accelerator_carries_is_checked():
    with pytest.raises(InvalidAcceleratorError, match="h2d_accelerator is .* not an accelerator"):
        adapt(types.SimpleNamespace(_name="acme", h2d_accelerator=object()))


def test_an_implicit_accelerator_follows_set_accelerator_between_copies():
    import accelerators

    first, second = SimulatedAccelerator(1), SimulatedAccelerator(2)
    transfer = build_transfer({"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 4}})
    try:
        for simulated in (first, second):
            accelerators.set_accelerator(simulated)
            destination = simulated.device_empty(10, dtype=torch.bfloat16)
            transfer.copy(destination, torch.arange(10.0))
            assert destination.tolist() == list(range(10))
            assert simulated.pinned_bytes == 16
        assert first.pinned_bytes == 0, "what was pinned for the accelerator before is given back"
    finally:
        transfer.close()
        accelerators.set_accelerator(None)
    assert second.pinned_bytes == 0


def test_the_simulated_accelerator_as_deepspeed_sees_it():
    simulated = SimulatedAccelerator()
    deepspeeds = simulated.as_deepspeed()
    source = torch.arange(6.0).view(2, 3)
    pinned = deepspeeds.pin_memory(source)
    assert torch.equal(pinned, source)
    assert pinned.shape == (2, 3)
    assert deepspeeds.is_pinned(pinned)
    assert simulated.pinned_bytes == 24
    assert deepspeeds.unpin_memory(pinned)
    assert simulated.pinned_bytes == 0
    assert not deepspeeds.is_pinned(source)
    destination = simulated.device_empty(6, dtype=torch.float32)
    simulated.enqueue_copy(destination, deepspeeds.pin_memory(torch.ones(6)))
    deepspeeds.synchronize()
    assert destination.tolist() == [1.0] * 6


def test_memory_that_deepspeed_could_only_page_lock_is_not_pinned_for_cuda():
    """Under ``DS_PIN_MEMORY_BACKEND=native``, where DeepSpeed could not register it with the device."""

    class Native(New):
        _name = "cuda"
        registered = ()

        def _torch_is_pinned(self, tensor):
            return tensor.data_ptr() in self.registered

    native, memory = Native(), torch.zeros(4)
    adapter = CudaAccelerator(native)
    assert native.is_pinned(memory)
    assert not adapter.is_pinned(memory)
    native.registered = (memory.data_ptr(),)
    assert adapter.is_pinned(memory)


def test_ranges_and_alignment_are_deepspeeds():
    class Aligned(New):
        def pin_memory_alignment(self):
            return 4096

        def range_push(self, message):
            self.calls.append(message)

        def range_pop(self):
            self.calls.append("pop")

    aligned = Aligned()
    adapter = DeepSpeedAdapter(aligned)
    assert adapter.capabilities.register_alignment_bytes == 4096
    assert DeepSpeedAdapter(New()).capabilities.register_alignment_bytes == 1
    adapter.range_push("h2d/pinned_direct")
    adapter.range_pop()
    assert aligned.calls == ["h2d/pinned_direct", "pop"]


def test_the_adapter_goes_by_the_class_and_then_by_the_name():
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from deepspeed.accelerator.hpu_accelerator import HPU_Accelerator
    from deepspeed.accelerator.klxpu_accelerator import KLXPU_Accelerator

    def of(base, name):
        kind = type("Vendor", (base,), {"__init__": lambda self: setattr(self, "_name", name), "h2d_accelerator": None})
        kind.__abstractmethods__ = frozenset()
        return type(adapt(kind()))

    assert of(CUDA_Accelerator, "acme") is CudaAccelerator
    assert of(KLXPU_Accelerator, "klxpu") is CudaAccelerator
    assert of(CUDA_Accelerator, "cpu") is CudaAccelerator
    assert of(CPU_Accelerator, "cpu") is CpuAccelerator
    assert of(CPU_Accelerator, "acme") is DeepSpeedAdapter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HPU_Accelerator, "Stream", None)
        patch.setattr(HPU_Accelerator, "Event", None)
        assert of(HPU_Accelerator, "hpu").__name__ == "HpuAccelerator"


@pytest.mark.parametrize("kind", ["Event", "Stream"])
def test_events_or_streams_that_take_arguments_are_a_missing_capability(kind):
    class Vendors:
        def __init__(self, device):
            raise AssertionError("cannot be reached")

    class Optional:
        def __init__(self, device=None):
            pass

    vendor = type("Vendor", (New,), {"Event": Optional, "Stream": Optional, kind: Vendors})
    adapter = DeepSpeedAdapter(vendor())
    capability = f"{kind.lower()}s"
    assert getattr(adapter, kind) is None
    assert not getattr(adapter.capabilities, capability)
    reason = adapter.capabilities.why_not(capability)
    assert "missing a required argument: 'device'" in reason
    assert reason.endswith(".")
    other = {"Event": "streams", "Stream": "events"}[kind]
    assert getattr(adapter.capabilities, other)


@pytest.mark.parametrize("answer", [False, RuntimeError("unknown pointer")])
def test_registered_memory_that_is_not_seen_as_pinned_is_refused(answer):
    class Unseen(New):
        def is_pinned(self, tensor):
            self.calls.append((tensor.data_ptr(), tensor.nbytes, "asked"))
            if isinstance(answer, Exception):
                raise answer
            return answer

    unseen, memory = Unseen(), torch.zeros(4)
    with pytest.raises(RuntimeError, match="16 bytes were registered with xpu, which does not see them as pinned"):
        DeepSpeedAdapter(unseen).register_host_memory(memory.data_ptr(), 16)
    address = memory.data_ptr()
    assert unseen.calls == [(address, 16), (address, 16, "asked"), address]


def test_a_copy_blocks_where_nothing_tells_whether_the_source_is_pinned():
    class DoesNotTell(New):
        def is_pinned(self, tensor):
            raise RuntimeError("unknown pointer")

    destination = torch.zeros(4)
    DeepSpeedAdapter(DoesNotTell()).enqueue_copy(destination, torch.arange(4.0))
    assert destination.tolist() == [0, 1, 2, 3]


def test_whether_a_graph_is_recorded_is_asked_of_deepspeed_or_else_of_torch(monkeypatch):
    class Tells(New):
        def is_current_stream_capturing(self):
            return True

    assert DeepSpeedAdapter(Tells()).is_current_stream_capturing() is True
    assert DeepSpeedAdapter(New()).is_current_stream_capturing(0) is False
    runtime = types.SimpleNamespace(is_available=lambda: True, is_current_stream_capturing=lambda: True)
    monkeypatch.setattr(torch, "acme", runtime, raising=False)
    new = New()
    new._name = "acme"
    assert DeepSpeedAdapter(new).is_current_stream_capturing(0) is True
