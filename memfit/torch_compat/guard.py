"""PrivateUse1 in torch 2.6 to 2.9, which take a device's guard and hooks from C++ alone. Linux on x86-64.

Both are objects of one pointer, to a table of virtual functions (C++ ABI of Itanium). The tables are copies of those
that torch has for devices without work (meta's guard, HPU's default hooks). In the guard's, what names a device or a
stream is eight bytes of machine code, which answer PrivateUse1's device 0 and its stream 0. Operators without a kernel
for its autograd key (collectives) go on to their own, as they do for every other device.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memfit.torch_compat.versions import refused

_WORD = ctypes.sizeof(ctypes.c_void_p)
_BEFORE = 2
"""Words of a table before its first function."""
_META, _PRIVATE_USE_1, _DEVICE_TYPES = 14, 20, 21
"""Of c10/core/DeviceType.h."""

_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
_REGISTER_GUARD = "_ZN3c104impl24DeviceGuardImplRegistrarC1ENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"
"""``c10::impl::device_guard_impl_registry``, and the constructor that puts a guard into it."""
_GUARD_FUNCTIONS = 23
_NAMING = (0, 1, 2, 5, 6, 7, 8, 9)
"""type, exchangeDevice, getDevice, getStream, getDefaultStream, getStreamFromGlobalPool, getNewStream, exchangeStream:
all give PrivateUse1, as a type, as a device (type and index, two bytes) or as a stream (device, and id in another
register)."""
_ON_EVENTS = {11: 3, 12: 3, 13: 15, 17: 3}
"""Functions of events, which meta's guard refuses, by place: ``record``, ``block`` and ``synchronizeEvent`` do nothing,
as ``setDevice`` does, and ``queryEvent`` says yes, as ``queryStream`` does."""
_CODE = b"\xb8" + _PRIVATE_USE_1.to_bytes(4, "little") + b"\x31\xd2\xc3"
"""mov eax, 20; xor edx, edx; ret"""

_HOOKS = "_ZTVN2at17HPUHooksInterfaceE"
_REGISTER_HOOKS = "_ZN2at33RegisterPrivateUse1HooksInterfaceEPNS_25PrivateUse1HooksInterfaceE"
"""The table of ``at::HPUHooksInterface``, and ``at::RegisterPrivateUse1HooksInterface``."""
_HOOKS_FUNCTIONS = 16
_Nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Bool = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)

_kept: list[Any] = []
"""Objects, tables and functions, which live as long as the process."""


def register_before_2_10(name: str, module: Any, is_available: Callable[[], bool]) -> None:
    """Registers the device as ``memfit.torch_compat.backend.register`` does.

    Raises:
        InputError: another system or processor, or a build of torch that hides these names.
    """
    libraries = Path(torch.__file__).parent / "lib"
    try:
        core, cpu = (ctypes.CDLL(str(libraries / file)) for file in ("libc10.so", "libtorch_cpu.so"))
        guards = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(core, _GUARDS)
        register_guard, register_hooks = getattr(core, _REGISTER_GUARD), getattr(cpu, _REGISTER_HOOKS)
        hooks_table = ctypes.addressof(ctypes.c_void_p.in_dll(cpu, _HOOKS)) + _BEFORE * _WORD
        naming = _naming()
    except (OSError, ValueError, AttributeError) as error:
        raise refused("before torch 2.10, memfit works on Linux on x86-64 alone") from error
    if not guards[_PRIVATE_USE_1]:
        table = ctypes.c_void_p.from_address(guards[_META] or 0).value or 0
        guard = _copied(table, _GUARD_FUNCTIONS)
        for place, source in _ON_EVENTS.items():
            guard[_BEFORE + place] = guard[_BEFORE + source]
        for place in _NAMING:
            guard[_BEFORE + place] = naming
        hooks = _copied(hooks_table, _HOOKS_FUNCTIONS)
        for place, function in _hooks_functions(is_available).items():
            hooks[_BEFORE + place] = ctypes.cast(function, ctypes.c_void_p).value
        register_guard(ctypes.create_string_buffer(_WORD), ctypes.c_int8(_PRIVATE_USE_1), _object(guard))
        register_hooks(_object(hooks))
        autograd = torch.library.Library("_", "IMPL", "AutogradPrivateUse1")
        autograd.fallback(torch.library.fallthrough_kernel, "AutogradPrivateUse1")
        _kept.append(autograd)
    torch.utils.rename_privateuse1_backend(name)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch._register_device_module(name, module)


def _naming() -> int:
    """The address of the function that gives PrivateUse1.

    Raises:
        OSError: its code is of another processor, or the system lets no code be made.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise OSError(platform.machine())
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page[: len(_CODE)] = _CODE
    _kept.append(page)
    return ctypes.addressof(ctypes.c_char.from_buffer(page))


def _hooks_functions(is_available: Callable[[], bool]) -> dict[int, Any]:
    """By place in the table, behind two destructors: ``isBuilt``, ``isAvailable``, ``hasPrimaryContext``, ``init``."""
    functions = {
        2: _Bool(lambda hooks: True),
        3: _Bool(lambda hooks: is_available()),
        4: _Bool(lambda hooks: True),
        5: _Nothing(lambda hooks: None),
    }
    _kept.append(functions)
    return functions


def _copied(table: int, count: int) -> Any:
    """The words of a table of ``count`` functions."""
    words = (ctypes.c_void_p * (_BEFORE + count))()
    ctypes.memmove(words, table - _BEFORE * _WORD, ctypes.sizeof(words))
    return words


def _object(words: Any) -> ctypes.c_void_p:
    """An object with this table."""
    pointer = ctypes.c_void_p(ctypes.addressof(words) + _BEFORE * _WORD)
    _kept.extend((words, pointer))
    return ctypes.c_void_p(ctypes.addressof(pointer))
