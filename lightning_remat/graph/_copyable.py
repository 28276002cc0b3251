"""Which tensors may be copied to the host and back."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from lightning_remat._blocks import block_bytes
from lightning_remat.graph._op import Op, Tensor, TensorRole


def copyable(ops: Sequence[Op], tensors: Sequence[Tensor], storages: Sequence[int], device: str) -> tuple[bool, ...]:
    """Whether each tensor is alone made with its storage, which it fills, as far as that is known, and no op mutates."""
    made: dict[int, list[int]] = {}
    for op in ops:
        read = {tensors[t].storage for t in op.inputs}
        for t in op.outputs:
            if (storage := tensors[t].storage) not in read:
                made.setdefault(storage, []).append(t)
    mutated = {tensors[t].storage for op in ops for t in op.mutates}
    kind = device.partition(":")[0]

    def may(index: int, tensor: Tensor) -> bool:
        storage = tensor.storage
        if tensor.role is not TensorRole.INTERMEDIATE or made.get(storage) != [index] or storage in mutated:
            return False
        nbytes = _nbytes(tensor)
        return storages[storage] > 0 and (nbytes is None or block_bytes(nbytes, kind) == storages[storage])

    return tuple(may(index, tensor) for index, tensor in enumerate(tensors))


def _nbytes(tensor: Tensor) -> int | None:
    """Bytes of the elements; ``None`` where their type is not given, -1 where its name does not say."""
    if not tensor.dtype:
        return None
    bits = re.search(r"\d+", tensor.dtype.replace("bool", "bool8"))
    return math.prod(tensor.shape) * int(bits[0]) // 8 if bits else -1
