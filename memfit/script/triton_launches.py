"""Triton's kernels on the virtual card, of whatever library: a launch writes to the tensors that it is given.

A kernel allocates nothing: its caller allocates the outputs before the launch. So no kernel is compiled, and each
launch is left out. Triton's own code for autotuners and heuristics runs, and asks a driver that answers for the card:
an autotuner that has several configurations tries them in the first launch, beside the buffer with which Triton clears
the card's second-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

from memfit.device.virtual.backend import is_inside
from memfit.device.virtual.patching import replaced
from memfit.nested_tensors import tensors_in
from memfit.script import triton_stand_in
from memfit.script.import_hooks import Hook, on_import
from memfit.script.triton_driver import Driver, do_bench
from memfit.script.triton_writes import written_parameters
from memfit.trace.filled_tensors import FILLED
from memfit.trace.forgotten_content import forget

LINE = "Triton's kernels were not run; they are taken to allocate nothing themselves"
TRIED = "Triton's autotuners try kernels in their first launch, beside a buffer of 256 MiB, as without a stored choice"


class CompiledKernel:
    """Stands where Triton returns a compiled kernel. Registers and shared memory are the least that there are."""

    n_regs, n_spills = 1, 0
    metadata = SimpleNamespace(shared=1, num_warps=4, num_stages=1, num_ctas=1)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def _init_handles(self) -> None: ...


@contextmanager
def triton_launches(note: Callable[[str], None]) -> Iterator[None]:
    """Context in which launches of Triton's kernels on the virtual card are left out, whichever library makes them.

    Args:
        note: called with a line on what is not computed.
    """

    def launch(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        if not warmup:
            note(LINE)
            written = written_parameters(kernel.fn)
            for name, value in {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}.items():
                if name in written:
                    _forget(value)
        return CompiledKernel()

    def try_all(tuner: Any, key: Any, configs: Any, benchmark: Callable[[], None]) -> bool:
        benchmark()  # a stored choice is neither read nor written
        return False

    def noting(*args: Any, **kwargs: Any) -> Any:
        note(TRIED)
        return do_bench(*args, **kwargs)

    with ExitStack() as stack:

        def drive(module: Any) -> tuple[Any, dict[str, Any]]:
            driver = Driver()
            driver.get_benchmarker = lambda: noting  # type: ignore[method-assign]
            module.driver.set_active(driver)
            stack.callback(_without_driver, module.driver)
            return module, {}

        def tune(module: Any) -> tuple[Any, dict[str, Any]]:
            known = hasattr(module.Autotuner, "check_disk_cache")
            return module.Autotuner, {"check_disk_cache": try_all} if known else {}

        def measure(module: Any) -> tuple[Any, dict[str, Any]]:
            names = [name for name in ("do_bench", "do_bench_cudagraph", "do_bench_proton") if hasattr(module, name)]
            return module, dict.fromkeys(names, noting)

        hooks: dict[str, Hook] = {
            "triton.runtime.jit": lambda module: (module.JITFunction, {"run": launch}),
            "triton.runtime.driver": drive, "triton.runtime.autotuner": tune, "triton.testing": measure,
        }  # fmt: skip
        if is_inside():
            stack.enter_context(replaced(triton_stand_in.JITFunction, run=launch))
            stack.enter_context(replaced(triton_stand_in.Autotuner, bench=staticmethod(noting)))
            stack.enter_context(on_import(hooks))
        yield


def _without_driver(owner: Any) -> None:
    """Triton looks for its driver anew."""
    owner._active = None
    if "active" in vars(owner):
        owner.active = owner.default


def _forget(value: Any) -> None:
    """What is known of the content of a launch's argument, which may be a descriptor of a tensor, is not any more."""
    for tensor in tensors_in([value]):
        forget(tensor)
        tensor.__dict__.pop(FILLED, None)  # its version stays as it was
