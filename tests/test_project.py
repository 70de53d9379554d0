"""What the README says of the project is so: layers, configuration, links, and the command that runs the tests."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

import config_schema

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = {path.stem: path for path in ROOT.glob("*.py")}


def layers() -> dict[str, int]:
    """Layer by module, as the README's table has it."""
    table: dict[str, int] = {}
    for number, names in re.findall(r"^\| (\d) \w+ \| (`[^|]+`) \|", README, flags=re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            assert name not in table, f"{name} is listed twice"
            table[name] = int(number)
    return table


def imports(path: Path) -> set[str]:
    """The project's modules that a module imports, wherever in it, but not for type checking alone."""
    found: set[str] = set()
    skipped: set[ast.AST] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped.update(part for child in node.body for part in ast.walk(child))
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found & MODULES.keys()


def test_every_module_stands_in_one_layer():
    assert layers().keys() == MODULES.keys()


@pytest.mark.parametrize("name", sorted(MODULES))
def test_no_module_imports_upward(name):
    order = layers()
    upward = {other for other in imports(MODULES[name]) if order[other] > order[name]}
    assert upward == set()


def test_no_modules_import_each_other_in_a_circle():
    graph = {name: imports(path) for name, path in MODULES.items()}
    while graph:
        free = {name for name, needs in graph.items() if not needs & graph.keys()}
        assert free, f"a circle among {sorted(graph)}"
        graph = {name: needs for name, needs in graph.items() if name not in free}


def test_the_readme_lists_every_key_of_the_configuration_with_its_default():
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| [^|]+ \| `([^|]*)` \|", README, flags=re.MULTILINE))
    described = {key: default for key, _, default, _ in config_schema.describe_config()}
    assert {key: rows.get(key) for key in described} == described


def test_the_readme_s_test_command_is_what_ci_runs():
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    install, test = re.search(
        r"^    (python -m pip install -r requirements\.txt) && (.+ pytest)$", README, flags=re.MULTILINE
    ).groups()
    assert "python -m pip install" in ci
    assert install.rsplit(" ", 1)[1] in ci
    assert test in ci.splitlines()


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_the_readme_s_links_lead_somewhere(link):
    assert (ROOT / link).exists()


def test_shell_scripts_parse():
    for script in (ROOT / "run_demo.sh", ROOT / ".ci" / "run"):
        done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert script.stat().st_mode & 0o100, f"{script} cannot be run"


@pytest.mark.parametrize("requirement", (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines())
def test_every_requirement_is_pinned_and_has_a_reason(requirement):
    is_heading = not requirement.strip() or requirement.startswith("#")
    assert is_heading or re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]* +# \w.+", requirement)
