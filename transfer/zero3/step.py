"""The patches of a step, in the order in which they run.

``step`` makes the plan, and waits at the end of the step, also after an error. ``prepare`` begins to read state that
passes from files through the step. ``update`` updates a master tile by tile, and submits what was updated, where the
optimizer can do that; else ``copy_back`` submits the whole. ``release`` waits for a master whose buffer DeepSpeed is
about to reuse. ``post_step``, in which parameters are gathered, waits for everything. Between steps every copy is
finished, and files hold all state that is in files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import stage3, summary
from .attachments import attachments
from .patching import Patch
from .plan import StepPlan
from .stage3 import Stage3, SwappedState
from .swapped import passing


def step(original: Callable[..., Any]) -> Callable[..., Any]:
    def patched(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        attachment = attachments.find(optimizer)
        if attachment is None or attachment.plan is not None:  # a step within a step
            return original(optimizer, *args, **kwargs)
        attachment.finish()  # what an interrupted step has left
        attachment.states.check()  # also where DeepSpeed is to swap now
        if attachment.gradients is not None:
            attachment.gradients.settle()  # what has failed in backward is raised before anything is updated
        report = summary.reporter(attachment)
        with attachment.finishing():
            try:
                attachment.plan = StepPlan(Stage3(optimizer), attachment.transfer, deferred=attachment.deferred)
                attachment.say(attachment.plan.waits_because)
                if not attachment.asked_gradients:  # of an engine that is older than `install`
                    attachment.take_gradients(Stage3(optimizer), attachment.plan.waits_because)
                result = original(optimizer, *args, **kwargs)
            except BaseException:
                passing.abandon(attachment, Stage3(optimizer))
                raise
            finally:
                attachment.plan = None
        report()
        return result

    return patched


def prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    def patched(optimizer: Any, sub_group_id: int, *args: Any, **kwargs: Any) -> Any:
        attachment = attachments.get(optimizer)
        if attachment is not None and passing.passes(attachment, Stage3(optimizer), sub_group_id):
            return None
        return original(optimizer, sub_group_id, *args, **kwargs)

    return patched


def update(original: Callable[..., Any]) -> Callable[..., Any]:
    def patched(optimizer: Any, sub_group_id: int, *args: Any) -> Any:
        attachment = attachments.get(optimizer)
        if attachment is None:
            return original(optimizer, sub_group_id, *args)
        attachment.release_source(sub_group_id)  # an update writes what a copy might still read
        plan, view = attachment.plan, Stage3(optimizer)
        if plan is not None and plan.is_passing(sub_group_id):
            with passing.updating(attachment, view, sub_group_id):
                result = original(optimizer, sub_group_id, *args)
            if not plan.defers():
                attachment.finish()
            return result
        if plan is None or not plan.in_tiles or not plan.defers():
            if attachment.has_lazy_gradient(view, sub_group_id):
                attachment.hold_gradient(sub_group_id)
            return original(optimizer, sub_group_id, *args)
        pair = plan.tile_partitions(sub_group_id)
        if pair is None and not attachment.has_lazy_gradient(view, sub_group_id):
            return original(optimizer, sub_group_id, *args)

        def submit(offset: int, length: int) -> None:
            if pair is not None and attachments.get(optimizer) is attachment:  # else another one was attached meanwhile
                plan.tile(sub_group_id, pair)
                destination, source = (each.narrow(0, offset, length) for each in pair)
                attachment.submit(sub_group_id, destination, source, offset)

        to_device = plan.partitions(sub_group_id) is not None
        if to_device:
            attachment.prepare(view, sub_group_id, view.master(sub_group_id).data)
        with attachment.updating(view, sub_group_id, submit, to_device=to_device):
            return original(optimizer, sub_group_id, *args)

    return patched


def copy_back(original: Callable[..., Any]) -> Callable[..., Any]:
    def patched(optimizer: Any, sub_group_id: int) -> Any:
        attachment = attachments.find(optimizer)
        if attachment is None:
            return original(optimizer, sub_group_id)
        view, plan = Stage3(optimizer), attachment.plan
        if plan is not None and plan.is_passing(sub_group_id):
            summary.of(attachment).copy_back(view, sub_group_id, served=True)
            view.unflatten(sub_group_id)
            return None
        pair = attachment.partitions(view, sub_group_id)
        defers = plan is not None and plan.defers()
        in_tiles = plan is not None and plan.take_tiled(sub_group_id) and defers
        summary.of(attachment).copy_back(view, sub_group_id, served=in_tiles or pair is not None)
        if in_tiles:
            view.unflatten(sub_group_id)
            return None
        if pair is None:
            return original(optimizer, sub_group_id)
        attachment.prepare(view, sub_group_id, pair[1])
        if defers:
            attachment.submit(sub_group_id, *pair)
        else:
            if plan is not None:
                attachment.finish()  # tiles of this master, and everything that other code might see
            # `copy` waits: the next forward's all-gathers run on a stream that does not wait for this one.
            attachment.copy(sub_group_id, *pair)
        view.unflatten(sub_group_id)
        return None

    return patched


def release(original: Callable[..., Any]) -> Callable[..., Any]:
    def patched(optimizer: Any, sub_group_id: int, *args: Any) -> Any:
        attachment = attachments.get(optimizer)
        plan = None if attachment is None else attachment.plan
        if attachment is not None and plan is not None and plan.is_passing(sub_group_id):
            SwappedState(Stage3(optimizer), sub_group_id).let_go()
            return None
        if attachment is not None and (plan is None or sub_group_id in plan.swapped):
            attachment.release_source(sub_group_id)
        result = original(optimizer, sub_group_id, *args)
        if attachment is not None and attachment.gradients is not None:
            attachment.gradients.show(sub_group_id)
        return result

    return patched


def post_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def patched(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        attachment = attachments.get(optimizer)
        if attachment is None or attachment.is_ending:  # SuperOffload's calls ZeRO-3's
            return original(optimizer, *args, **kwargs)
        attachment.finish()
        attachment.ended_steps += 1
        summary.of(attachment).step(Stage3(optimizer))
        attachment.is_ending = True
        try:
            result = original(optimizer, *args, **kwargs)
        finally:
            attachment.is_ending = False
        attachment.states.settle()  # last: what cannot be written must not keep DeepSpeed from ending its step
        return result

    return patched


PATCHES: dict[str, Patch] = {
    stage3.STEP: step,
    stage3.PREPARE: prepare,
    stage3.UPDATE: update,
    stage3.COPY_BACK: copy_back,
    stage3.RELEASE: release,
    stage3.POST_STEP: post_step,
}
