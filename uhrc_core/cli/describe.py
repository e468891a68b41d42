"""What `uhrc describe` says about a resolved config, as data and as text."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from uhrc_core.assemble import cache_class
from uhrc_core.boundary import call_factory
from uhrc_core.config.resolved import ResolvedComponent, ResolvedConfig


def description(resolved: ResolvedConfig) -> dict[str, Any]:
    """JSON-ready facts; bytes and units are per dp rank, ``None`` where no model is known."""
    config = resolved.config
    parts = [_component(part) for part in resolved.components]
    known = [part["pool_bytes"] for part in parts if part["pool_bytes"] is not None]
    return {
        "cache": config.cache.model_dump(mode="json"),
        "scheduler": config.scheduler.model_dump(),
        "components": parts,
        "hicache": _hicache(resolved),
        "pool_bytes": sum(known) if len(known) == len(parts) else None,
        "hbm_bytes": config.memory.hbm_bytes,
        "combination": f"({', '.join(part['kind'] for part in parts)}) is allowed",
        "cache_class": cache_class(resolved).__name__,
    }


def print_description(facts: dict[str, Any]) -> None:
    """The facts as tables on stdout."""
    console = Console(highlight=False, markup=False)
    cache = facts["cache"]
    console.print(
        f"{facts['cache_class']}: page_size {cache['page_size']}, dp_size {cache['dp_size']}, "
        f"{cache['max_requests']} requests of up to {cache['max_context_len']} tokens, "
        f"eviction {cache['eviction_policy']}, routing {facts['scheduler']['dp_schedule_policy']}"
    )
    console.print(f"combination {facts['combination']}")
    if facts["hicache"] is not None:
        options = (f"{key} {value}" for key, value in facts["hicache"].items() if key != "name")
        console.print(", ".join([f"host tier {facts['hicache']['name']}", *options]))
    table = Table("component", "kind", "eviction priority", "pool", "bytes", "layers")
    for part in facts["components"]:
        table.add_row(
            part["name"],
            part["kind"],
            f"{part['eviction_priority']} (leaf 0)",
            f"{part['num_units']:,} {part['unit']}",
            _bytes(part["pool_bytes"]),
            "unknown" if part["num_layers"] is None else str(part["num_layers"]),
        )
    console.print(table)
    for part in facts["components"]:
        for buffer in part["buffers"]:
            console.print(
                f"{part['name']}: {buffer['count']} x {buffer['dtype']}{buffer['shape']}, "
                f"{_bytes(buffer['bytes'])} each"
            )
        for kernel, implementations in part["kernels"].items():
            console.print(f"{part['name']}: kernel {kernel} ({', '.join(implementations)})")
    if facts["pool_bytes"] is None:
        console.print("bytes unknown: set model.hf_config")
    elif facts["hbm_bytes"] is not None:
        share = facts["pool_bytes"] / facts["hbm_bytes"]
        console.print(f"{share:.1%} of memory.hbm_bytes = {facts['hbm_bytes']:,} per dp rank")


def _component(part: ResolvedComponent) -> dict[str, Any]:
    pool, dp_size, backend = part.pool, part.context.dp_size, part.context.backend
    kernels = {**part.spec.kernels, **(backend.kernels if backend else {})}
    groups: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for buffer in pool.buffers if pool else ():
        groups.setdefault((buffer.shape, buffer.dtype), []).append(buffer.num_bytes)
    return {
        "name": part.spec.name,
        "kind": part.spec.kind.name,
        "eviction_priority": part.spec.eviction_priority,
        "params": call_factory(part.key, "model_dump", dict, part.params.model_dump, mode="json"),
        "num_units": part.params.num_units,
        "unit": part.spec.kind.unit,
        "num_layers": None if part.pool is None else len(part.layers),
        "pool_bytes": pool.num_bytes // dp_size if pool else None,
        "buffers": [
            {"shape": list(shape), "dtype": dtype, "count": len(sizes), "bytes": sizes[0]}
            for (shape, dtype), sizes in groups.items()
        ],
        "kernels": {name: list(forms) for name, forms in kernels.items()},
    }


def _hicache(resolved: ResolvedConfig) -> dict[str, Any] | None:
    params = resolved.config.hicache
    if params is None:
        return None
    return call_factory("hicache", "model_dump", dict, params.model_dump, mode="json")


def _bytes(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "unknown"
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
