"""What torchtitan's configurations answer, as Markdown."""

from __future__ import annotations

from docs.results import result, table


def registry() -> str:
    """torchtitan's configurations by model: those that are answered, and what is said of the others."""
    rows = result("titan_registry")["rows"]
    models: dict[str, tuple[list[str], list[str]]] = {}
    for name, row in rows.items():
        model, _, own = name.partition("/")
        answered, refused = models.setdefault(model, ([], []))
        if "why" in row:
            refused.append(f"`{own}`: {row['why'].partition(': ')[2] or row['why']}")
        else:
            answered.append(f"`{own}`")
    return table(
        ["model", "answered", "not answered"],
        [
            [f"`{model}`", ", ".join(answered), "<br>".join(line.replace("|", "\\|") for line in refused)]
            for model, (answered, refused) in models.items()
        ],
    )


def registry_text() -> str:
    """How many of them are answered."""
    figures = result("titan_registry")
    rows, versions = figures["rows"], figures["versions"]
    count = sum("why" not in row for row in rows.values())
    packages = ("torch", "triton", "torchao", "flash-linear-attention", "nvidia-cutlass-dsl")
    beside = ", ".join(f"{name} {versions[name]}" for name in packages if name in versions)
    return (
        f"Of the {figures['configurations']} configurations of torchtitan {versions['torchtitan']}, {len(rows)} were "
        f"asked for, and {count} are answered beside {beside}, without torchvision."
    )
