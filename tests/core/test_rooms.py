"""The rooms of the core: imports lead downwards, and no two modules need each other."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

CORE = Path(__file__).parents[2] / "uhrc_core"

#: From the ground up: a room imports from itself and from those before it.
ROOMS = (
    ("errors", "kinds"),
    ("indices", "arguments", "boundary", "combination"),
    ("pools",),
    ("cache",),
    ("baseline", "scheduling"),
    ("registry",),
    ("config",),
    ("assemble",),
    ("plugin_api",),
    ("testing", "cli"),
)
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}


def module_of(path: Path) -> str:
    parts = ("uhrc_core", *path.relative_to(CORE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(CORE.rglob("*.py"))}


def imports_of(module: str) -> set[str]:
    """The modules of the core that one imports, for the type checker alone included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in MODULES else node.module for name in names)
    return {name for name in found if name in MODULES}


def room_of(module: str) -> str:
    return module.split(".")[1]


def test_no_two_modules_need_each_other() -> None:
    graph = {module: imports_of(module) - {module} for module in MODULES}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError and names the circle


def test_every_module_stands_in_a_room() -> None:
    rooms = {room_of(module) for module in MODULES if "." in module}
    assert rooms - {"__main__"} == set(FLOOR)


def test_imports_lead_to_the_same_room_or_downwards() -> None:
    upwards = [
        f"{module} imports {name}"
        for module in MODULES
        if "." in module and room_of(module) != "__main__"
        for name in imports_of(module)
        if "." in name
        and room_of(name) != room_of(module)
        and FLOOR[room_of(name)] >= FLOOR[room_of(module)]
    ]
    assert upwards == []
