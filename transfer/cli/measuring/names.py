"""Names of variants that figures refer to; apart, as the commands' help needs them before torch is loaded."""

#: DeepSpeed's own copy-back.
DEEPSPEED = "deepspeed"
#: The lower bound of a copy.
LINK = "link"
#: The staging ring that a copy-back was first served by.
RING = "ring 2 x 2^26"
#: The lower bound of a step, of `h2d bench zero3`.
NO_COPY_BACK = "no copy-back"
