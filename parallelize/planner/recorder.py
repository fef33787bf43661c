"""What a traced computation keeps in memory and asks of the device, seen below autograd and DTensor."""

import weakref

import torch
import torch.utils._pytree as pytree
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass


class Recorder(TorchDispatchMode):
    """Counts the bytes of every storage that is alive, and hands each operation to ``on_operation``.

    live_bytes, peak_bytes: of tensors made inside, and of those given to ``track``.
    """

    def __init__(self, on_operation=None):
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.on_operation = on_operation
        self._alive: dict[int, tuple[weakref.ref, int]] = {}

    def track(self, tensors) -> None:
        """Count the tensors of a nested structure from now until they are freed."""
        for tensor in pytree.tree_leaves(tensors):
            if not isinstance(tensor, torch.Tensor):
                continue
            if is_traceable_wrapper_subclass(tensor):
                names, _ = tensor.__tensor_flatten__()
                self.track([getattr(tensor, name) for name in names])
            else:
                self._add(tensor.untyped_storage())

    def restart_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        known = self._alive.get(key)
        if known is not None and known[0]() is not None:
            reference, before = known
        else:
            reference, before = weakref.ref(storage, lambda _: self._remove(key)), 0
        size = storage.nbytes()
        self._alive[key] = (reference, size)
        self.live_bytes += size - before
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _remove(self, key: int) -> None:
        _, size = self._alive.pop(key, (None, 0))
        self.live_bytes -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # seen again as what it does to the local tensors
        result = function(*args, **(kwargs or {}))
        self.track(result)
        if self.on_operation is not None:
            self.on_operation(function, args, result)
        return result

    def __enter__(self):
        self._resize = torch.UntypedStorage.resize_

        def resize(storage, size):
            self._resize(storage, size)
            if storage._cdata in self._alive:
                self._add(storage)

        # FSDP2 frees and takes back its gathered parameters so: no operation is dispatched.
        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *exception):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*exception)
