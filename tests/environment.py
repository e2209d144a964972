"""What the processes of the tests have in common."""

#: An optimizer of DeepSpeed's that no test takes is decorated by ``torch.compile``: for it, each process that makes an
#: engine would import torch's compiler, which takes a second.
NO_COMPILER = {"TORCHDYNAMO_DISABLE": "1"}
