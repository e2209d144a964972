"""Which ZeRO-3 optimizers are attached, and whether ``install`` is in force."""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from ..config_file import ConfigLike
from ..routing import build_transfer
from .attachment import Attachment
from .config import config_for_engine
from .stage3 import Stage3

logger = logging.getLogger("transfer")


@dataclass(frozen=True)
class Installed:
    """``install`` is in force, with this configuration."""

    config: ConfigLike | None


class Attachments:
    """The attachments of this process, by optimizer. They keep no optimizer alive.

    Attributes:
        lock: Held for every change.
        installed: What ``install`` was called with, or None where it is not in force.
        get: Gives the attachment of an optimizer, or None.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.installed: Installed | None = None
        self._by_optimizer: weakref.WeakKeyDictionary[Any, Attachment] = weakref.WeakKeyDictionary()
        self._detached: weakref.WeakSet[Any] = weakref.WeakSet()  # by `detach`, while `install` is in force
        self.get = self._by_optimizer.get

    @property
    def is_idle(self) -> bool:
        """Whether nothing is attached, and nothing will be."""
        return self.installed is None and not self._by_optimizer

    def find(self, optimizer: Any) -> Attachment | None:
        """As ``get``, and attaches an optimizer that is older than ``install``.

        Raises:
            ConfigError: The configuration for it has mistakes.
            Exception: As ``add``.
        """
        attachment = self.get(optimizer)
        if attachment is None and self.installed is not None and optimizer not in self._detached:
            config = config_for_engine(self.installed.config, None)
            attachment = Attachment(build_transfer(config), config, by_install=True)
            self.add(optimizer, attachment)
        return attachment

    def add(self, optimizer: Any, attachment: Attachment) -> None:
        """Prepares the memory that the optimizer's copy-backs read, and replaces an earlier attachment.

        Raises:
            AcceleratorFailedError: The transfer's accelerator is unknown or not available here.
            SwapError: Another process uses the same swap files.
            Exception: What ``prepare`` raises. Nothing has changed in either case.
        """
        stage3 = Stage3(optimizer)
        try:
            attachment.states.claim(stage3)
            for sub_group_id in stage3.sub_groups:
                attachment.take_in(stage3, sub_group_id)
            pairs = [attachment.partitions(stage3, sub_group_id) for sub_group_id in stage3.sub_groups]
            for sub_group_id, pair in enumerate(pairs):
                if pair is not None:
                    attachment.prepare(stage3, sub_group_id, pair[1])
        except BaseException:
            attachment.give_up()
            raise
        if stage3.keeps_masters_in_memory and not any(pairs):
            logger.warning(
                "none of the %d sub-groups of this ZeRO-3 engine has its master partition on the host and its "
                "low-precision partition on the device: while that is so, no copy-back goes to the device",
                len(pairs),
            )
        with self.lock:
            before = self.get(optimizer)
            if before is not None and before is not attachment:
                attachment.inherit(before)
            self._by_optimizer[optimizer] = attachment
            self._detached.discard(optimizer)
        if before is not None and before.transfer is not attachment.transfer:
            before.give_up()

    def remove(self, optimizer: Any) -> Attachment | None:
        """Takes an optimizer's attachment away, and returns it; ``install`` does not attach it again."""
        with self.lock:
            if self.installed is not None:
                self._detached.add(optimizer)
            return self._by_optimizer.pop(optimizer, None)

    def uninstall(self) -> list[tuple[Any, Attachment]]:
        """Takes away what ``install`` attached, and returns it."""
        with self.lock:
            self.installed = None
            self._detached.clear()
            by_install = [(optimizer, found) for optimizer, found in self._by_optimizer.items() if found.by_install]
            for optimizer, _ in by_install:
                del self._by_optimizer[optimizer]
        return by_install


#: The one of this process.
attachments = Attachments()
