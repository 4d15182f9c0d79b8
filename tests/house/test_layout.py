"""What no tool checks: names of hosts, a folder that must stay no package, and that each module says its purpose."""

import ast

from tests.house.tree import ROOT, files

# In pieces, so that this file does not name what it looks for.
REGISTRIES = [
    "".join(parts)
    for parts in [
        ("pypi", ".org"), ("pythonhosted", ".org"), ("npmjs", ".org"), ("npmjs", ".com"), ("yarnpkg", ".com"),
        ("deb.debian", ".org"), ("security.debian", ".org"), ("archive.ubuntu", ".com"),
    ]
]  # fmt: skip


def test_no_file_names_the_host_of_a_package_registry() -> None:
    """Which mirror is used is the machine's business; a lock or script that names one breaks behind another."""
    named = {
        f"{path.relative_to(ROOT)}: {host}"
        for path in files()
        for host in REGISTRIES
        if host in path.read_text(encoding="utf-8", errors="ignore")
    }
    assert not named


def test_alembic_folder_is_no_package() -> None:
    """An __init__.py in it would hide the library of the same name from every import in this project."""
    assert not (ROOT / "alembic/__init__.py").exists()


def test_every_module_says_what_it_is_for() -> None:
    """The first lines of a file tell a reader whether it is the right one."""
    silent = [
        str(path.relative_to(ROOT)) for path in files("*.py") if not ast.get_docstring(ast.parse(path.read_bytes()))
    ]
    assert not silent


def test_every_test_says_what_it_shows() -> None:
    """A failing test is read by somebody who did not write it; its one sentence says what is at stake."""
    silent = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in files("tests/**/test_*.py", "tests/test_*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert not silent
