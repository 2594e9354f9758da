"""Working memory that each thread keeps: fresh pages can cost more than the work done in them."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_kept = threading.local()


def scratch(owner: str, shape: tuple[int, ...], dtype: DTypeLike = np.uint8) -> NDArray[Any]:
    """An array whose content is whatever was there, of this thread and `owner`.

    Valid until the thread's next call with that name; never shared with another thread.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory: NDArray[np.uint8] | None = _kept.__dict__.get(owner)
    if memory is None or memory.size < size:
        memory = _kept.__dict__[owner] = np.empty(size, np.uint8)
    return memory[:size].view(dtype).reshape(shape)
