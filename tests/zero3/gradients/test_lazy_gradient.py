"""Lazy gradients against the plain fp32 tensor that DeepSpeed would have, under any sequence of what is done to it."""

import copy
import io
import os
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.running import run_program
from transfer.zero3.gradients.lazy_gradient import LazyGradient
from transfer.zero3.gradients.master_gradient import MOST_FACTORS, MasterGradient
from transfer.zero3.stage3 import Parameter

SIZES = (3, 1, 5, 0, 4)
NUMEL, BASE = sum(SIZES), 2
FACTORS = (1.0, 0.5, 1 / 3, 1 / 1024.0, float(torch.tensor(0.1)), 7.0)


def parameters():
    offset = 0
    for key, numel in enumerate(SIZES):
        yield Parameter(key, offset, numel)
        offset += numel


class Pair:
    """A lazy gradient, and the two buffers that DeepSpeed would have: what is accumulated, and fp32."""

    def __init__(self, dtype=torch.bfloat16):
        self.accumulated, self.plain = torch.zeros(NUMEL, dtype=dtype), torch.zeros(NUMEL)
        self.buffers = [torch.zeros(BASE + NUMEL + 1, dtype=dtype) for _ in range(2)]
        for buffer in self.buffers:
            buffer[:BASE] = buffer[BASE + NUMEL :] = float("nan")  # other sub-groups'
        self.settled, self.reducing = 0, set()
        self.owner = MasterGradient(
            self.buffers, BASE, list(parameters()), torch.float32, self.settle, self.is_reduced, self.make
        )
        self.lazy = LazyGradient(self.owner, 0, NUMEL)

    def settle(self):
        self.settled += 1

    def is_reduced(self, piece):
        return piece.parameter.key in self.reducing

    def make(self, owner):
        return owner.read(0, owner.numel).clone()

    def reduce(self, key, values, *, final):
        """What a reduction does: always to what is accumulated, and to fp32 where it is the last one before a step."""
        parameter = list(parameters())[key]
        here = slice(parameter.offset, parameter.offset + parameter.numel)
        self.accumulated[here] = values[: parameter.numel]
        for piece in self.owner.pieces:
            if piece.parameter.key == key:
                if not final and piece.current == piece.final:
                    piece.current = 1 - piece.current
                self.buffers[piece.current][BASE:][here] = values[: parameter.numel]
                if final:
                    self.owner.reduced(piece)
        if final:
            self.plain[here] = self.accumulated[here].float()
            if self.owner.memory is not None:
                self.owner.memory[here] = self.plain[here]

    def check(self):
        """Bit for bit, the whole and each range."""
        assert bits(self.lazy.clone()) == bits(self.plain)
        scratch = torch.full((NUMEL + 3,), float("nan"))
        for offset, length in ((0, NUMEL), (1, 7), (4, 1), (5, 8), (12, 1), (3, 0)):
            assert bits(self.owner.read(offset, length, scratch)) == bits(self.plain[offset : offset + length])


def bits(tensor):
    return tensor.contiguous().view(torch.int32).tolist()


def drawn(generator):
    return torch.randn(max(SIZES), generator=generator)


ACTIONS = st.one_of(
    st.tuples(st.just("reduce"), st.integers(0, len(SIZES) - 1), st.booleans()),
    st.tuples(st.just("scale"), st.sampled_from(FACTORS), st.sampled_from(["number", "tensor", "double"])),
    st.tuples(st.just("set"), st.integers(0, NUMEL), st.integers(0, NUMEL)),
    st.tuples(st.just("scale a part"), st.integers(0, NUMEL), st.integers(0, NUMEL)),
    st.tuples(st.sampled_from(["keep a view", "add", "zero"]), st.just(0), st.just(0)),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(ACTIONS, max_size=25), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_any_sequence_of_what_is_done_to_a_gradient(actions, dtype):
    pair, generator, views = Pair(dtype), torch.Generator().manual_seed(1), []
    for action, one, other in actions:
        begin, end = sorted((one, other)) if action in ("set", "scale a part") else (0, 0)
        for gradient in (pair.lazy, pair.plain):
            if action == "scale":
                makes = {"number": float, "tensor": torch.tensor, "double": lambda f: torch.tensor(f).double()}
                gradient.mul_(makes[other](one))
            elif action == "set":
                values = torch.arange(float(end - begin))
                gradient.narrow(0, begin, end - begin).data.copy_(values.double() if end % 2 else values)
            elif action == "scale a part":
                gradient[begin:end].mul_(3.0)
            elif action == "add":
                gradient.add_(0.5)
            elif action == "zero":
                gradient.zero_()
            elif action == "keep a view":
                views.append(gradient.view(-1, 1))
        if action == "reduce":
            pair.reduce(one, drawn(generator), final=other)
        pair.check()
    assert all(bits(lazy) == bits(plain) for lazy, plain in zip(views[::2], views[1::2], strict=True))


def filled():
    pair, generator = Pair(), torch.Generator().manual_seed(2)
    for key in range(len(SIZES)):
        pair.reduce(key, drawn(generator), final=True)
    pair.lazy.mul_(0.3)
    pair.plain.mul_(0.3)
    return pair


READS = {
    "arithmetic": lambda g: g * 2 + g,
    "norm": lambda g: g.norm().reshape(1),
    "float": lambda g: g.to(torch.float32).float().clone(),  # which is the gradient itself, as of a plain tensor
    "another dtype": lambda g: g.to(torch.float64).float(),
    "clone": lambda g: g.clone(),
    "stack": lambda g: torch.stack([g, g]),
    "isnan": lambda g: torch.isnan(g).float(),
    "index": lambda g: g[torch.tensor([1, 3])],
    "a slice of a slice": lambda g: g[2:][3:7] + 1,
    "negative slice": lambda g: g[-4:] + 0,
    "split": lambda g: torch.cat([each * 2 for each in g[1:9].clone().split(3)]),
    "foreach": lambda g: torch.cat(torch._foreach_mul([g, g], 2.0)),
    "into another": lambda g: torch.zeros(NUMEL).add_(g),
    "copied from": lambda g: torch.zeros(NUMEL).copy_(g),
    "out": lambda g: torch.add(g, 1, out=torch.empty(NUMEL)),
    "a keyword": lambda g: torch.addcmul(g, tensor1=g, tensor2=g),
    "list": lambda g: torch.tensor(g.tolist()),
    "deepcopy": copy.deepcopy,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "save": lambda g: torch.load(saved(g)),
    "repr": lambda g: torch.tensor([float(len(repr(g)))]),
    "item": lambda g: torch.tensor([g[3].item()]),
}


def saved(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("name", READS)
def test_who_only_reads_gets_the_values_and_no_memory_stays(name):
    pair = filled()
    got = READS[name](pair.lazy)
    assert type(got) is torch.Tensor
    assert bits(got) == bits(READS[name](pair.plain))
    if name != "item":  # of one element, which torch takes by a view
        assert pair.owner.memory is None
    assert pair.settled, "what was copied there is waited for"


KEEPS = {
    "view": lambda g: g.view(-1, 1),
    "reshape": lambda g: g.reshape(1, NUMEL),
    "step": lambda g: g[::2],
    "chunks": lambda g: g.chunk(2)[1],
    "storage": lambda g: torch.tensor([], dtype=torch.float32).set_(g.untyped_storage()),
    "numpy": lambda g: torch.from_numpy(g.numpy()),
}


@pytest.mark.parametrize("name", KEEPS)
def test_a_view_that_is_kept_makes_the_gradient_real_once(name):
    pair = filled()
    kept = KEEPS[name](pair.lazy)
    assert bits(kept) == bits(KEEPS[name](pair.plain))
    kept.mul_(2)
    KEEPS[name](pair.plain).mul_(2)
    assert bits(pair.lazy.clone()) == bits(pair.plain)
    assert pair.owner.memory is not None
    assert KEEPS[name](pair.lazy).data_ptr() == kept.data_ptr(), "the same memory for all"


def test_a_write_of_another_shape_is_refused_and_changes_nothing():
    pair = filled()
    for values in (torch.ones(NUMEL + 1), torch.ones(2, NUMEL)):
        with pytest.raises(RuntimeError):
            pair.plain.copy_(values)
        with pytest.raises(RuntimeError):
            pair.lazy.copy_(values)
    pair.check()
    pair.lazy.narrow(0, 2, 3).copy_(torch.tensor(4.0))
    pair.plain.narrow(0, 2, 3).copy_(torch.tensor(4.0))
    pair.check()


def test_a_gradient_that_is_never_reduced_stays_bounded():
    """DeepSpeed multiplies it in every step; the factors must not pile up."""
    pair, generator = filled(), torch.Generator().manual_seed(3)
    for step in range(5 * MOST_FACTORS):
        pair.reduce(2, drawn(generator), final=True)
        for gradient in (pair.lazy, pair.plain):
            gradient.mul_(FACTORS[1 + step % 4])
        pair.check()
        assert len(pair.owner._factors) <= MOST_FACTORS
    assert pair.owner.memory is None


def test_a_gradient_of_zeros_takes_no_memory():
    pair = Pair()
    for _ in range(5 * MOST_FACTORS):
        pair.lazy.mul_(0.5)
        assert len(pair.owner._factors) <= MOST_FACTORS
    assert all(piece.own is None for piece in pair.owner.pieces)
    for gradient in (pair.lazy, pair.plain):
        gradient.mul_(float("inf"))  # 0 * inf is NaN
    assert pair.lazy.isnan().all()
    assert pair.plain.isnan().all()


def test_it_is_the_grad_of_a_parameter_like_any_other():
    pair = filled()
    master = torch.nn.Parameter(torch.zeros(NUMEL))
    master.grad = pair.lazy
    assert master.grad is pair.lazy
    optimizer = torch.optim.SGD([master], lr=1.0)
    optimizer.step()
    assert bits(master.data) == bits(-pair.plain)
    optimizer.zero_grad(set_to_none=False)
    assert master.grad.tolist() == [0.0] * NUMEL


@pytest.mark.slow
def test_compiled_code_that_asks_for_the_address_gets_an_error(cpu_adam):
    done = run_program(
        """
        import torch
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from tests.zero3 import cpu_adam_build
        from tests.zero3.gradients.test_lazy_gradient import filled
        cpu_adam_build.ask_the_cpu_once()
        pair = filled()
        master = torch.nn.Parameter(torch.zeros(13))
        optimizer = DeepSpeedCPUAdam([master])
        master.grad = pair.lazy
        try:
            optimizer.step()
        except RuntimeError as error:
            print("refused:", error)
        """,
        environment=os.environ,
    )
    assert "refused:" in done.stdout, done.stderr[-2000:]
