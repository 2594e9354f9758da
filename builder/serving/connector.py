"""The part of draftmill that runs inside vLLM: hands the hidden states of a request to a file.

One file that needs only the standard library, torch and vllm, because the launcher copies it next
to the server. Which requests exist and where their states lie in the KV cache is left to vLLM's
ExampleHiddenStatesConnector (the interface is the same in 0.24 to 0.32); this subclass

- works on the CPU as well (the stock one kills the engine there at the first request),
- writes `FILE.part` and renames it, so `FILE` is whole whenever it exists,
- says in `FILE.error` why a file could not be written, and keeps the engine alive,
- writes nothing for a request that its client gave up before it was finished,
- puts `target_layer_ids` into the file's metadata, so that a reader can compare them,
- rounds to the dtype that `states_dtype` in its extra config names, whatever the model computes in.

As with the stock connector, `FILE.lock` is held with LOCK_EX until the write has ended.

Shapes: T tokens, L layers (auxiliary layers, then the last), H hidden size.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm." + __name__)

_DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int64: "I64",
}


class CopyDone:
    """Stands in for a CUDA event when the copy was made at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class DraftmillConnector(stock.ExampleHiddenStatesConnector):
    """Writes `hidden_states` [T, L, H] and `token_ids` [T] of every finished request."""

    # ---- in the scheduler's process

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        if not self.allow_custom_save_path:
            # the request id contains the client's X-Request-Id: it must not lead out of the folder
            for req_id in meta.new_req_filenames:
                path = os.path.join(self._storage_path, f"{file_stem(req_id)}.safetensors")
                meta.new_req_filenames[req_id] = self._request_filenames[req_id] = path
        return meta

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        req_id = request.request_id
        never_scheduled = req_id not in self._request_filenames
        if never_scheduled or request.status == RequestStatus.FINISHED_ABORTED:
            # nobody waits for the file, so nobody would delete it
            self._request_filenames.pop(req_id, None)
            return False, None
        finished: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return finished

    def get_finished_count(self) -> int:
        # only tensor-parallel rank 0 writes and reports (vLLM before 0.25 expects every rank to)
        return 1

    # ---- in the worker's process

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        name = self._kv_transfer_config.get_from_extra_config("states_dtype", None)
        states_dtype = self._kv_cache.dtype if name is None else getattr(torch, name, None)
        if states_dtype not in _DTYPE_NAMES:
            # at the start, not at the first request
            raise ValueError(f"states_dtype {name or states_dtype} cannot be written")
        self._states_dtype = states_dtype

    def wait_for_save(self) -> None:
        if not (self._is_tp_rank_zero and self.use_lock and self.has_connector_metadata()):
            return
        metadata = self._get_connector_metadata()
        for req_id, path in metadata.new_req_filenames.items():
            if req_id not in self._lock_fds:
                # without a lock the client finds nothing to wait for and asks again
                with _logged(f"cannot lock {path}"):
                    self._lock_fds[req_id] = _locked(path)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self.has_connector_metadata():
            for pending in self._get_connector_metadata().pending_saves:
                self._submit_async_write(pending)
        self._accumulated_finished_req_ids.update(finished_req_ids)
        sent = set()
        for req_id in list(self._accumulated_finished_req_ids):
            event = self._req_copy_events.get(req_id)
            if event is not None:
                if not event.query():
                    continue
                del self._req_copy_events[req_id]
                sent.add(req_id)
            self._accumulated_finished_req_ids.discard(req_id)
            lock_fd = self._lock_fds.pop(req_id, None)
            if lock_fd is not None:  # given up by its client after it was scheduled
                _remove_locked(lock_fd)
        return sent or None, None

    def _submit_async_write(self, pending: stock.PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        req_id, path = pending.req_id, pending.filename
        event: Any = CopyDone()
        lock_fd = self._lock_fds.pop(req_id, None)
        try:
            if lock_fd is None and self.use_lock:
                lock_fd = _locked(path)
            hidden_states_TLH, event = self._copy_to_host(pending)
        except (OSError, RuntimeError) as error:
            # one sample is lost, the engine lives
            logger.error("hidden states of %s cannot be saved: %s", req_id, error)
            _write_error(path, error)
            if lock_fd is not None:
                os.close(lock_fd)
        else:
            spec_config = self._vllm_config.speculative_config.draft_model_config.hf_config
            layer_ids = list(getattr(spec_config, "eagle_aux_hidden_state_layer_ids", []))
            future = self._executor.submit(
                write_states, path, hidden_states_TLH, pending.token_ids, layer_ids, event, lock_fd
            )
            self._req_futures[req_id] = future
            future.add_done_callback(partial(self._on_write_done, req_id))
        # set in every case: it is what lets the scheduler free the blocks
        self._req_copy_events[req_id] = event

    def _copy_to_host(self, pending: stock.PendingSave) -> tuple[torch.Tensor, Any]:
        """Starts the copy out of the KV cache: host tensor [T, L, H] and the event of its end."""
        kv_cache = self._kv_cache
        num_tokens = pending.token_ids.shape[0]
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = blocks[:, None] * self._block_size + torch.arange(self._block_size)[None, :]
        slots = slots.flatten()
        if slots.shape[0] < num_tokens:
            raise RuntimeError(f"{num_tokens} tokens, but only {slots.shape[0]} slots in the cache")
        if kv_cache.device.type != "cuda":
            # indexing copies, so the blocks may be freed when this returns
            on_host = stock.extract_from_kv_cache(kv_cache, slots.to(kv_cache.device), num_tokens)
            return on_host.to("cpu", self._states_dtype).contiguous(), CopyDone()
        cuda: Any = torch.cuda
        stream = self._get_copy_stream()
        written = cuda.Event()
        written.record()
        stream.wait_event(written)
        with cuda.stream(stream), _sync_allowed():
            on_device = stock.extract_from_kv_cache(
                kv_cache, slots.to(kv_cache.device, non_blocking=True), num_tokens
            ).to(self._states_dtype)
            pinned = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            pinned.copy_(on_device, non_blocking=True)
        copied = cuda.Event()
        copied.record(stream)
        return pinned, copied


def file_stem(req_id: str) -> str:
    """A request id as one path component."""
    return req_id.replace("/", "_").replace("\0", "_").lstrip(".")[:200]


def write_states(
    path: str,
    hidden_states_TLH: torch.Tensor,
    token_ids_T: torch.Tensor,
    layer_ids: list[int],
    event: Any,
    lock_fd: int | None,
) -> None:
    """Writes a safetensors file by a temporary name, then lets go of the lock. Runs in a thread."""
    part = path + ".part"
    try:
        event.synchronize()
        tensors = {"hidden_states": hidden_states_TLH, "token_ids": token_ids_T.contiguous()}
        with open(part, "wb") as file:
            file.write(_header(tensors, {"target_layer_ids": json.dumps(layer_ids)}))
            for tensor in tensors.values():
                # a plain write lets go of the GIL, which safetensors before 0.8 does not
                file.write(tensor.view(torch.uint8).reshape(-1).numpy().data)
        os.replace(part, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        _write_error(path, error)
        raise
    finally:
        if lock_fd is not None:
            os.close(lock_fd)


def _header(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    """The head of a safetensors file that holds `tensors` in this order."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        head[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _locked(path: str) -> int:
    """A descriptor of `path`.lock that holds LOCK_EX."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    lock_fd = os.open(path + ".lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    return lock_fd


def _remove_locked(lock_fd: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(os.readlink(f"/proc/self/fd/{lock_fd}"))
    os.close(lock_fd)


def _write_error(path: str, error: BaseException) -> None:
    """Best effort: the disk may be full, and then the missing file has to say it all."""
    with contextlib.suppress(OSError), open(path + ".error", "w") as file:
        file.write(f"{type(error).__name__}: {error}\n")


@contextlib.contextmanager
def _logged(what: str) -> Any:
    try:
        yield
    except OSError as error:
        logger.error("%s: %s", what, error)


def _sync_allowed() -> Any:
    """vLLM 0.26 and later can forbid device synchronisation; here it is wanted."""
    try:
        from vllm.utils.gpu_sync_debug import gpu_sync_allowed
    except ImportError:
        return contextlib.nullcontext()
    return gpu_sync_allowed()
