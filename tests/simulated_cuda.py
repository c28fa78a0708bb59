"""A CUDA device played on the CPU, so that tests of placement run where there is none.

Tensors of class Simulated say that they are on ``cuda:0``, and are computed with like any others.
Their values cannot be read without being brought down. Work that a GPU does later than it is asked
for is late here too: a copy down that nothing waits for holds no values yet, and a copy up whose
source changes before it is made fails the test. The operations of a CUDA graph are recorded, and
run again on replay in the memory that they had in the capture: nothing of Python runs then.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_iter, tree_map

CUDA = torch.device("cuda", 0)
_META, _CPU = torch.device("meta"), torch.device("cpu")

_aten: Any = torch.ops.aten
_PRIM_DEVICE = torch.ops.prim.device.default
# The host learns something, and has to wait for it.
_WAITS = {
    _aten._local_scalar_dense,
    _aten.equal,
    _aten.is_nonzero,
    _aten.masked_select,
    _aten.nonzero,
    _aten.unique_dim,
    _aten._unique2,
    _aten.repeat_interleave,
}
_NO_KERNEL = {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided}
_INDEXED = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}


class Simulated(torch.Tensor):
    """A tensor on the simulated device; its values are in ``raw``, on the CPU."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> Simulated:
        with _disable_current_modes():
            shell = torch.empty_strided(raw.size(), raw.stride(), dtype=raw.dtype, device=_META)
        made: Simulated = torch.Tensor._make_subclass(
            cls, shell, False, dispatch_device=True, device_for_backend_keys=CUDA
        )
        made.raw = raw
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Simulated({self.raw})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _PRIM_DEVICE:
            return CUDA
        raise RuntimeError(f"{func} on a tensor of a device that is no longer simulated")

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return self.cpu().numpy()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()  # whose address tells it from others

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("a tensor of the simulated device cannot be sent to another process")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = Simulated(self.raw.clone()).requires_grad_(self.requires_grad)
        copied = torch.nn.Parameter(copy) if isinstance(self, torch.nn.Parameter) else copy
        memo[id(self)] = copied
        return copied


class Crossings(TorchDispatchMode):
    """Counts copies between devices, and waits of the host for the GPU, real or simulated.

    Attributes:
        launches: the number of kernels, and of graphs on the simulated device.
        ups: the shape of each tensor copied to the GPU.
        downs: the shape of each tensor copied from it.
        waits: the name of each operation that the host waits for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.ups: list[tuple[int, ...]] = []
        self.downs: list[tuple[int, ...]] = []
        self.waits: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is _aten.to:  # in another mode, where nothing takes it apart
            with self:
                return func.decompose(*args, **kwargs)
        if func is not _PRIM_DEVICE:
            self._note(func, args, kwargs)
        out = func(*args, **kwargs)
        packet, crosses = func.overloadpacket, crossing_of(func, args, kwargs) is not None
        if not (func.is_view or crosses or packet in _NO_KERNEL) and any(map(on_gpu, tensors(out))):
            self.launches += 9 if packet is _aten.logsumexp else 1
        return out

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        crossing = crossing_of(func, args, kwargs)
        if crossing is not None:
            source, up, waits = crossing
            (self.ups if up else self.downs).append(tuple(source.shape))
            if waits:
                self.waits.append(func._schema.name)
        elif waits_for_values(func, args):
            self.waits.append(func._schema.name)


def crossing_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, bool, bool] | None:
    """The source of a copy between devices, whether it goes up, and whether the host waits."""
    packet = func.overloadpacket
    if packet is _aten._to_copy:
        source, target = args[0], kwargs.get("device")
        target = None if target is None else torch.device(target)
    elif packet is _aten.copy_:
        source, target = args[1], CUDA if on_gpu(args[0]) else _CPU
    else:
        return None
    if (
        target is None
        or not isinstance(source, torch.Tensor)
        or on_gpu(source) == (target.type == "cuda")
    ):
        return None
    late = kwargs.get("non_blocking") or (packet is _aten.copy_ and len(args) > 2 and args[2])
    up = target.type == "cuda"
    # From memory that is not pinned, the driver copies at once; the host waits for the stream.
    return source, up, not (late and (not up or is_pinned(source)))


def waits_for_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Tell whether the host waits for values of tensors on the GPU."""
    packet = func.overloadpacket
    first = args[0] if args else None
    if not on_gpu(first):
        return False
    if packet in _INDEXED:
        indices = [index for index in args[1] if index is not None]
        return any(i.dtype is torch.bool or not on_gpu(i) for i in indices)
    return packet in _WAITS


def on_gpu(value: Any) -> bool:
    """Tell whether a tensor is on a GPU, real or simulated."""
    there = isinstance(value, torch.Tensor) and value.device.type == "cuda"
    return there or isinstance(value, Simulated)


_pinned: list[tuple[int, torch.Tensor]] = []  # held: what reuses the memory is not pinned


def simulated() -> bool:
    """Tell whether a device is simulated at present."""
    return bool(_current)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's memory was pinned, truly or on the simulated device."""
    if not simulated():
        return tensor.is_pinned()
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        at = tensor.data_ptr()
    return any(begin <= at < begin + pinned.nbytes for begin, pinned in _pinned)


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    pinned = tensor.clone()
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        _pinned.append((pinned.data_ptr(), pinned))
    return pinned


class _Device(TorchDispatchMode):
    """Computes on the CPU what is asked of the simulated device."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()
        self.sync_debug_mode = "default"
        self.broken = False  # by a capture that has failed
        self._sources: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._results: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._hidden = False

    @contextmanager
    def reported_on_cpu(self) -> Iterator[None]:
        """Have tensors say that they are on the CPU."""
        before, self._hidden = self._hidden, True
        try:
            yield
        finally:
            self._hidden = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is _PRIM_DEVICE:
            simulated = isinstance(args[0], Simulated)
            return (_CPU if self._hidden else CUDA) if simulated else func(*args)
        if func.overloadpacket is _aten.is_pinned:
            return is_pinned(args[0])
        if func.overloadpacket in (_aten.pin_memory, _aten._pin_memory):
            return _pin(args[0])
        if func.overloadpacket is _aten.to:
            with self:
                return func.decompose(*args, **kwargs)
        target = kwargs.get("device")
        target = None if target is None else torch.device(target)
        given = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
        there = [value for value in given if isinstance(value, Simulated)]
        if not there and (target is None or target.type != "cuda"):
            return func(*args, **kwargs)
        crossing = crossing_of(func, args, kwargs)
        if crossing is None:
            self._check_devices(func, args, given)
        waits = crossing[2] if crossing is not None else waits_for_values(func, args)
        if waits and self.sync_debug_mode == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        raw_args, raw_kwargs = tree_map(_raw, (args, kwargs))
        if target is not None:
            raw_kwargs["device"] = _CPU
        out = self._run(func, raw_args, raw_kwargs)
        if crossing is not None:
            out = self._cross(func, crossing, raw_args, out)
        if waits:
            self.synchronize()
        if func.overloadpacket is _aten.copy_:
            return args[0]
        if target is not None and target.type != "cuda":
            return out
        return return_and_correct_aliasing(func, args, kwargs, tree_map(_simulate, out))

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if self.broken:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly")
        before = torch.random.default_generator.get_state()
        torch.random.default_generator.set_state(self.generator.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            self.generator.set_state(torch.random.default_generator.get_state())
            torch.random.default_generator.set_state(before)

    def _cross(self, func: Any, crossing: Any, raw_args: Any, out: Any) -> Any:
        source, up, waits = crossing
        if func.overloadpacket is _aten._to_copy and out is raw_args[0]:
            out = out.clone()
        written = raw_args[0] if func.overloadpacket is _aten.copy_ else out
        if waits:
            return out
        if up:
            self._sources.append((source, source.clone()))
        else:
            self._results.append((written, written.clone()))
            written.fill_(torch.nan if written.is_floating_point() else 77)
        return out

    def _check_devices(self, func: Any, args: tuple[Any, ...], given: list[torch.Tensor]) -> None:
        if func.overloadpacket in _INDEXED:  # takes indices from anywhere
            given = [args[0], *args[2:3]]
        odd = [value for value in given if value.ndim and not isinstance(value, Simulated)]
        if odd:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {func} got cuda:0 and cpu"
            )

    def synchronize(self, *_: Any, **__: Any) -> None:
        """Finish the work that was asked for."""
        for source, copied in self._sources:
            assert torch.equal(source, copied), "memory changed while it was copied to the GPU"
        for written, values in self._results:
            written.copy_(values)
        self._sources, self._results = [], []


class _Event:
    """An event, or a stream: work is done in the order in which it is asked for."""

    def __init__(self, device: _Device, *_: Any, **__: Any):
        self.synchronize = device.synchronize

    def record(self, *_: Any) -> None:
        pass

    wait_stream = record


class _Graph(TorchDispatchMode):
    """A CUDA graph: records operations; what the host would wait for is refused meanwhile.

    After a capture that has failed, random numbers can no longer be drawn, as on a GPU.
    """

    def __init__(self, device: _Device) -> None:
        super().__init__()
        self._device = device
        self._operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _PRIM_DEVICE:
            return func(*args, **kwargs)
        if func.overloadpacket is _aten.to:
            with self:
                return func.decompose(*args, **kwargs)
        crossing = crossing_of(func, args, kwargs)
        if waits_for_values(func, args) if crossing is None else crossing[2]:
            raise RuntimeError(f"{func} is not permitted when a stream is capturing")
        out = func(*args, **kwargs)
        self._operations.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, Crossings):
                mode.launches += 1
        with _disable_current_modes(), self._device:  # unseen by others
            for func, args, kwargs, out in self._operations:
                again = func(*args, **kwargs)
                for old, new in zip(tensors(out), tensors(again), strict=True):
                    if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.copy_(new)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a value."""
    return [one for one in tree_iter(value) if isinstance(one, torch.Tensor)]


@contextmanager
def _capture(graph: _Graph, **_: Any) -> Iterator[None]:
    device = _current[-1]
    try:
        with graph:
            yield
    except BaseException:
        device.broken = True
        raise


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, Simulated) else value


def _simulate(value: Any) -> Any:
    plain = isinstance(value, torch.Tensor) and not isinstance(value, Simulated)
    return Simulated(value) if plain else value


class _Calls(TorchFunctionMode):
    """Functions of torch that ask for CUDA before anything is dispatched."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        # C++ would ask the meta device's guard for the index.
        args = tuple(_indexed(arg) for arg in args)
        kwargs = {name: _indexed(arg) for name, arg in (kwargs or {}).items()}
        if func is torch.Tensor.pin_memory:
            return _pin(args[0])
        if func is torch.Tensor.is_pinned:
            return is_pinned(args[0])
        target = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and str(target).startswith("cuda"):
            return func(*args, **{**kwargs, "device": None}).to(target)
        if func is torch.Tensor.cuda:
            return args[0].to(CUDA)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            with _current[-1].reported_on_cpu():  # C++ makes tensors out of the index itself
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _indexed(argument: Any) -> Any:
    named = isinstance(argument, str | torch.device) and str(argument) == "cuda"
    return CUDA if named else argument


_current: list[_Device] = []


@contextmanager
def simulated_cuda() -> Iterator[None]:
    """Simulate a CUDA device in this thread; on a build of torch without CUDA alone."""
    if torch.version.cuda is not None:
        pytest.skip("this build of torch asks a driver, which a simulated GPU has not")
    device = _Device()
    _guard_devices()
    with pytest.MonkeyPatch.context() as patch:
        for module in (torch.cuda, torch.cuda.random):
            patch.setattr(module, "current_device", lambda: 0)
            patch.setattr(module, "device_count", lambda: 1)
            patch.setattr(module, "is_initialized", lambda: True)
            patch.setattr(module, "_lazy_init", lambda: None)
        for name in ("Event", "Stream", "current_stream"):
            patch.setattr(torch.cuda, name, partial(_Event, device))
        for name in ("stream", "device"):
            patch.setattr(torch.cuda, name, nullcontext)
        patch.setattr(torch.cuda, "CUDAGraph", partial(_Graph, device))
        patch.setattr(torch.cuda, "graph", _capture)
        patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: device.sync_debug_mode)
        patch.setattr(
            torch.cuda, "set_sync_debug_mode", partial(setattr, device, "sync_debug_mode")
        )
        patch.setattr(torch.cuda, "default_generators", (device.generator,))
        patch.setattr(torch.cuda, "get_device_name", lambda *_: "simulated")
        patch.setattr(torch.cuda, "init", lambda: None)
        for name in ("is_available", "is_bf16_supported"):
            patch.setattr(torch.cuda, name, lambda: True)
        patch.setattr(torch.cuda, "synchronize", device.synchronize)
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        _current.append(device)
        try:
            with _Calls(), device:
                yield
        finally:
            _current.pop()
            _pinned.clear()
            torch.__future__.set_overwrite_module_params_on_conversion(overwrites)


def _guard_devices() -> None:
    """Let CUDA's device guard be that of the meta device, which does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 15).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10::DeviceType
    guards[cuda] = guards[cuda] or guards[meta]
