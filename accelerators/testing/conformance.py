"""The protocol of an accelerator as tests."""

from __future__ import annotations

import pytest
import torch

from ..protocol import Accelerator, check_accelerator
from .ordering import OrderingConformance
from .tools import accelerator_or_skip, check_values, fetch, skip_without


class AcceleratorConformance(OrderingConformance):
    """What every accelerator must do. Subclass it, set ``accelerator_name``, and pytest runs it.

    Override ``make_accelerator`` for an accelerator that is not registered, or for a fresh one a test.
    """

    accelerator_name: str = ""

    def make_accelerator(self, config: pytest.Config) -> Accelerator:
        return accelerator_or_skip(self.accelerator_name, config)

    @pytest.fixture
    def accelerator(self, pytestconfig: pytest.Config) -> Accelerator:
        return self.make_accelerator(pytestconfig)

    def test_has_the_whole_protocol(self, accelerator: Accelerator) -> None:
        check_accelerator(accelerator, "conformance was given")
        assert accelerator.name == self.accelerator_name

    def test_capabilities_agree_with_what_is_there(self, accelerator: Accelerator) -> None:
        capabilities = accelerator.capabilities
        assert capabilities.streams == (accelerator.Stream is not None)
        assert capabilities.events == (accelerator.Event is not None)
        for name in ("streams", "events", "pins_host_memory", "registers_host_memory", "copies_asynchronously"):
            if not getattr(capabilities, name):
                reason = capabilities.why_not(name)
                assert reason is not None
                assert reason.endswith(".")
                assert reason.count(". ") == 0, "a reason is one sentence"

    def test_is_available(self, accelerator: Accelerator) -> None:
        assert accelerator.unavailable_reason() is None

    def test_device_memory_is_on_the_device(self, accelerator: Accelerator) -> None:
        tensor = accelerator.device_empty(3, 5, dtype=torch.bfloat16)
        assert tensor.shape == (3, 5)
        assert tensor.dtype == torch.bfloat16
        assert accelerator.on_device(tensor)
        assert accelerator.on_device(tensor[1:, 2])

    def test_host_memory_is_on_the_host(self, accelerator: Accelerator) -> None:
        tensor = torch.zeros(10)
        assert accelerator.on_host(tensor)
        assert accelerator.on_host(tensor[2:5])

    def test_host_and_device_are_apart(self, accelerator: Accelerator) -> None:
        skip_without(accelerator, "pins_host_memory")
        assert not accelerator.on_device(torch.zeros(10))
        assert not accelerator.on_host(accelerator.device_empty(10, dtype=torch.float32))

    def test_pin_empty_gives_writable_host_memory(self, accelerator: Accelerator) -> None:
        tensor = accelerator.pin_empty(6, dtype=torch.float16)
        assert tensor.shape == (6,)
        assert tensor.dtype == torch.float16
        assert tensor.device.type == "cpu"
        tensor.copy_(torch.arange(6))
        assert tensor.tolist() == [0, 1, 2, 3, 4, 5]
        accelerator.unpin_memory(tensor)

    def test_is_pinned_tells_pinned_from_pageable(self, accelerator: Accelerator) -> None:
        skip_without(accelerator, "pins_host_memory")
        pinned = accelerator.pin_empty(64, dtype=torch.float32)
        assert accelerator.is_pinned(pinned)
        assert accelerator.is_pinned(pinned[8:16])
        assert not accelerator.is_pinned(pinned.clone())
        accelerator.unpin_memory(pinned)

    def test_nothing_is_pinned_without_the_capability(self, accelerator: Accelerator) -> None:
        if accelerator.capabilities.pins_host_memory:
            pytest.skip("This accelerator pins host memory.")
        assert not accelerator.is_pinned(torch.zeros(8))

    def test_registering_pins_memory_in_place(self, accelerator: Accelerator) -> None:
        skip_without(accelerator, "registers_host_memory")
        memory = torch.arange(4096.0)
        assert accelerator.register_host_memory(memory.data_ptr(), memory.nbytes)
        try:
            assert accelerator.is_pinned(memory)
            assert accelerator.is_pinned(memory[100:200])
        finally:
            accelerator.unregister_host_memory(memory.data_ptr())
        assert not accelerator.is_pinned(memory)
        assert torch.equal(memory, torch.arange(4096.0))

    def test_a_refused_registration_leaves_nothing_behind(self, accelerator: Accelerator) -> None:
        skip_without(accelerator, "registers_host_memory")
        memory = torch.zeros(4096)
        accelerator.register_host_memory(memory.data_ptr(), memory.nbytes)
        try:
            with pytest.raises(RuntimeError):
                accelerator.register_host_memory(memory.data_ptr(), memory.nbytes)
        finally:
            accelerator.unregister_host_memory(memory.data_ptr())
        device = accelerator.device_empty(8, dtype=torch.float32)
        device.fill_(3)  # would report the refusal once more if it stayed behind
        assert fetch(accelerator, device).tolist() == [3.0] * 8

    def test_registering_is_refused_without_the_capability(self, accelerator: Accelerator) -> None:
        if accelerator.capabilities.registers_host_memory:
            pytest.skip("This accelerator registers host memory.")
        memory = torch.zeros(4096)
        assert accelerator.register_host_memory(memory.data_ptr(), memory.nbytes) is False

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_enqueue_copy_from_pageable_memory(self, accelerator: Accelerator, dtype: torch.dtype) -> None:
        destination = accelerator.device_empty(1000, dtype=dtype)
        source = torch.linspace(-3, 3, 1000)
        accelerator.enqueue_copy(destination, source)
        check_values(fetch(accelerator, destination), source.to(dtype), "pageable source")

    def test_enqueue_copy_from_pinned_memory(self, accelerator: Accelerator) -> None:
        pinned = accelerator.pin_empty(1000, dtype=torch.float32)
        pinned.copy_(torch.linspace(-3, 3, 1000))
        destination = accelerator.device_empty(1000, dtype=torch.float32)
        accelerator.enqueue_copy(destination, pinned)
        check_values(fetch(accelerator, destination), torch.linspace(-3, 3, 1000), "pinned source")
        accelerator.unpin_memory(pinned)

    def test_enqueue_copy_back_into_pinned_memory(self, accelerator: Accelerator) -> None:
        source = accelerator.device_empty(50, 20, dtype=torch.float32)
        accelerator.enqueue_copy(source, torch.arange(1000.0).view(50, 20))
        accelerator.synchronize()
        pinned = accelerator.pin_empty(25, 20, dtype=torch.float32)
        accelerator.enqueue_copy(pinned, source[::2])
        accelerator.synchronize()
        assert torch.equal(pinned, torch.arange(1000.0).view(50, 20)[::2])
        accelerator.unpin_memory(pinned)

    def test_enqueue_copy_between_device_tensors_casts(self, accelerator: Accelerator) -> None:
        source = accelerator.device_empty(5, dtype=torch.float32)
        source.copy_(torch.tensor([1.00390625, 1.01171875, 1.01953125, 3.4e38, -0.0]))
        destination = accelerator.device_empty(5, dtype=torch.bfloat16)
        accelerator.enqueue_copy(destination, source)
        # 3F808000, 3F818000 and 3F828000 are ties: to even, 3F80, 3F82, 3F82; 3.4e38 rounds to inf.
        result = fetch(accelerator, destination).view(torch.int16).tolist()
        assert result == [0x3F80, 0x3F82, 0x3F82, 0x7F80, -0x8000]

    def test_the_source_may_change_after_a_copy_that_blocks(self, accelerator: Accelerator) -> None:
        memory = {"pageable": torch.empty(100_000), "pinned": accelerator.pin_empty(100_000, dtype=torch.float32)}
        for kind, dtype in (("pageable", torch.float32), ("pageable", torch.bfloat16), ("pinned", torch.bfloat16)):
            destination = accelerator.device_empty(100_000, dtype=dtype)
            source = memory[kind].fill_(7)
            accelerator.enqueue_copy(destination, source)
            source.fill_(8)
            expected = torch.full((100_000,), 7, dtype=dtype)
            check_values(fetch(accelerator, destination), expected, f"a {kind} source that changed after the copy")
        accelerator.unpin_memory(memory["pinned"])

    def test_enqueue_copy_writes_nothing_else(self, accelerator: Accelerator) -> None:
        pinned = accelerator.pin_empty(11, dtype=torch.float32)
        for source in (torch.ones(11), pinned.fill_(1)):
            memory = accelerator.device_empty(64, dtype=torch.float32)
            memory.fill_(-7)
            accelerator.synchronize()
            accelerator.enqueue_copy(memory[16:27], source)
            expected = torch.full((64,), -7.0)
            expected[16:27] = 1
            check_values(fetch(accelerator, memory), expected, "a copy between neighbours")
        accelerator.unpin_memory(pinned)
