"""Rules that can be checked automatically: the order of imports, short files."""

import ast
import importlib
import importlib.util
import re
import sys
from importlib import metadata
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "ffn_heterogeneity"
# Every room may import those before it, and itself, so that any two have ONE direction.
ORDER = ("tree", "wording", "progress", "adapters", "parallel", "models")
ORDER += ("probes", "heads", "losses", "data", "io", "surgery", "report", "papers", "evaluate")
ORDER += ("train", "bench", "launch", "api", "__main__")
# Rooms that import only the listed ones.
ALONE = {"data": set(), "report": {"io"}, "adapters": {"tree"}, "papers": {"report"}}
ONLY_FOR = {"papers": "papers"}  # a room that no other imports: the command joins it to reports
# Helpers that every room may import.
SHARED = {"tree", "wording", "progress", "io.files", "io.errors", "io.read", "io.child"}


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports(path: Path) -> set[str]:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ffn_heterogeneity"):
            inside = node.module.split(".")[1:]
            imported |= {".".join(inside)} if inside else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {
                alias.name.partition(".")[2]
                for alias in node.names
                if alias.name.startswith("ffn_heterogeneity.")
            }
    return imported


def sources(*tops: str) -> list[Path]:
    return [path for top in tops for path in sorted((REPOSITORY / top).rglob("*.py"))]


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"]


def test_imports_point_one_way():
    place, wrong = {name: i for i, name in enumerate(ORDER)}, []
    for path in PACKAGE.rglob("*.py"):
        here = room(path)
        if here == "__init__":
            continue
        assert here in place, f"{here}: a room that ORDER does not know"
        for target in imports(path):
            there = target.split(".")[0]
            if there == here or target in SHARED:
                continue
            alone = here in ALONE and there not in ALONE[here]
            if place[there] > place[here] or alone or ONLY_FOR.get(there, here) != here:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {target}")
    assert not wrong, wrong


def code_lines(function: ast.FunctionDef) -> int:
    """Lines of the body, without the docstring."""
    first = function.body[1 if ast.get_docstring(function) and len(function.body) > 1 else 0]
    return function.end_lineno - first.lineno + 1


def test_what_is_imported_is_there():
    """Also imports inside functions, which tests may not call."""
    missing = []
    for path in sources("ffn_heterogeneity", "scripts", "configs"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.module.split(".")[0] != PACKAGE.name:
                continue
            if importlib.util.find_spec(node.module) is None:
                missing.append(f"{path.name}: {node.module}")
                continue
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                inside = f"{node.module}.{name}"
                if not hasattr(module, name) and importlib.util.find_spec(inside) is None:
                    missing.append(f"{path.name}: {inside}")
    assert not missing, missing


def test_files_and_functions_stay_short():
    long = []
    for path in [*sources("ffn_heterogeneity", "scripts", "configs"), *sources("tests")]:
        text = path.read_text()
        if text.count("\n") > 390:
            long.append(f"{path.name}: {text.count(chr(10))} lines")
        if path.is_relative_to(REPOSITORY / "tests"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and code_lines(node) > 60:
                long.append(f"{path.name}: {node.name} has {code_lines(node)} lines of code")
    assert not long, long


def test_what_is_imported_is_declared():
    """An import name may differ from its package's name: yaml, PyYAML."""
    used, packages = set(), metadata.packages_distributions()
    for path in sources("ffn_heterogeneity", "configs", "scripts"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [node.module] if hasattr(node, "module") else [x.name for x in node.names]
                used |= {name.partition(".")[0] for name in names}
    ours = {"configs", *(path.stem for path in modules()), PACKAGE.name}
    text = (REPOSITORY / "pyproject.toml").read_text().lower().replace("-", "_")
    declared = set(re.findall(r'"([a-z]\w+)', text))
    for name in sorted(used - ours - sys.stdlib_module_names):
        known = [one.lower().replace("-", "_") for one in packages.get(name, [name])]
        assert declared & set(known), name


def test_no_class_name_stands_twice():
    where: dict[str, list[str]] = {}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert len(where) > 50
    assert not {name: paths for name, paths in where.items() if len(paths) > 1}


def test_docstrings_open_with_what_the_thing_is():
    """No question word or preposition first: "What a task is", "Of a row of that length"."""
    opening = re.compile(
        r"(What|Who|Where|How|Whether|Which|When|Whose|Of|By|With|Without|For|In|On|At|As|From|To|Into"
        r"|Over|Under|Within|Inside|After|Before|Behind|Between|Beside|Among|Through|Per|Via)\b"
    )
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    violations = []
    for path in PACKAGE.rglob("*.py"):
        nodes = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, kinds)]
        for node in nodes:
            name, text = getattr(node, "name", "the module"), ast.get_docstring(node) or ""
            if opening.match(text) and not name.startswith("_"):
                violations.append(f"{path.name}: {name}: {text.splitlines()[0]}")
    assert not violations, violations


def test_the_trainer_names_no_paper():
    """What a paper adds reaches train/ through registries, specs and configs."""
    papers = r"nucl|jreg|massive|macdrop|p32|fusion"
    named = re.compile(rf"\b(\w*_)?({papers})(_\w*)?\b|\b(Table|Figure) \d", re.I)
    violations = [
        f"{path.name}: {match[0]}"
        for path in sorted((PACKAGE / "train").glob("*.py"))
        for match in named.finditer(path.read_text())
    ]
    assert not violations, violations


def test_families_and_scripts_stay_short():
    families = (PACKAGE / "models/families").glob("*.py")
    families = [p for p in families if p.stem not in ("__init__", "common")]
    scripts = list((PACKAGE.parent / "scripts").glob("*.py"))
    assert len(families) >= 4 and len(scripts) >= 5
    too_long = [p.name for p in families if p.read_text().count("\n") > 150]
    too_long += [p.name for p in scripts if p.read_text().count("\n") > 60]
    assert not too_long, too_long
