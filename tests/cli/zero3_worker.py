"""The worker of ``h2d bench zero3`` with strategies of the tests registered, and its rewriting watched."""

from tests.cli import strategies
from transfer import register_strategy
from transfer.cli.bench_zero3 import worker as zero3_bench
from transfer.cli.measuring import bits

for name, strategy in {
    "copies_nothing": strategies.CopiesNothing,
    "refusing": strategies.Refuses,
    "wrong_in_one_bit": strategies.WrongInOneBit,
}.items():
    register_strategy(name, strategy)


def measure(options, ranks):
    """As ``zero3_bench.measure``; ``rewrites`` tells for each how many partitions were right before and after."""
    rewrites = []
    rewrite = zero3_bench.rewrite

    def watched(engine):
        before = right(engine)
        rewrite(engine)
        rewrites.append((before, right(engine)))

    def right(engine):
        optimizer = engine.optimizer
        pairs = zip(optimizer.fp16_partitioned_groups_flat, zero3_bench.masters(optimizer), strict=True)
        return sum(bits.same_bits(*pair) for pair in pairs)

    zero3_bench.rewrite = watched
    accelerator = zero3_bench.AcceleratorChoice(options["accelerator"]).resolve()
    register, registered = accelerator.register_host_memory, []
    accelerator.register_host_memory = lambda *memory: registered.append(memory) or register(*memory)
    result = zero3_bench.measure(options, ranks)
    result["registrations"] = len(registered)
    return {**result, "rewrites": rewrites, "pinned_bytes_at_the_end": accelerator.pinned_bytes}
