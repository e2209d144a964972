"""What ``h2d bench zero3`` compares in processes of their own: the names of the rows, and what each is."""

from __future__ import annotations

from ..measuring.names import DEEPSPEED

OURS = "default"
#: Each row of the peers, in processes of their own.
PEERS = {
    DEEPSPEED: "ZeRO-3 with offload_optimizer on the host, as it is",
    OURS: "the same with this package",
    "offload_param": "ZeRO-3 with offload_param on the host too",
    "offload_param, default": "the same with this package",
    "superoffload": "DeepSpeed's SuperOffload",
    "fsdp2": "torch's FSDP2 with CPUOffloadPolicy(pin_memory=True), fp32 masters, bf16 compute and fused AdamW",
}
#: What ``--peers`` takes beside the first two.
CHOICES = ("offload_param", "superoffload", "fsdp2")
#: With --nvme, the rows and what ``--peers`` calls them.
TUNED, PIPELINED = "deepspeed, tuned", "deepspeed, pipelined"
HALF, ALL, IN_MEMORY = "default, half resident", "default, all resident", "default, in memory"
NVME_PEERS = {
    DEEPSPEED: "offload_optimizer on NVMe, as it is",
    TUNED: "the same with the fastest settings of DeepSpeed's aio op on this drive",
    PIPELINED: "with these settings, pipeline_read and pipeline_write",
    OURS: "with this package",
    HALF: "with this package, and half of the state in host memory",
    ALL: "with this package, and all of it there",
    IN_MEMORY: "with this package and offload_optimizer on the host: no files",
}
NVME_CHOICES = {"tuned": TUNED, "pipelined": PIPELINED, "half": HALF, "all": ALL, "memory": IN_MEMORY}
