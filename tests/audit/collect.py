"""The targets of a package, by name."""

import importlib
import inspect
import pkgutil


def targets(package):
    """Every public function that a module of the package defines."""
    by_name = {}
    for iter_module in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{iter_module.name}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                assert name not in by_name, name
                by_name[name] = function
    return by_name
