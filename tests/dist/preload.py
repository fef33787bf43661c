"""What every worker needs, imported once by the server they are forked from. Starts no thread, runs no op."""

import torch.distributed.checkpoint  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import torch.distributed.pipelining  # noqa: F401
import torch.distributed.tensor.parallel  # noqa: F401

import trainer.build  # noqa: F401
import trainer.checkpoint  # noqa: F401
import trainer.loop  # noqa: F401
import trainer.verify_command  # noqa: F401
