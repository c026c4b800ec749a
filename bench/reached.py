r"""Print the test files that a change of some files can touch; bench/machines.sh runs no others again.

    python bench/reached.py FILE...         # in the repository

A Python file is touched by what it imports and by what a string in it names (a file, or a module with its package), a
bash script by the scripts that it names. A conftest.py touches the tests beside and below it; other kinds of files
touch all. Any change outside tests/ and bench/ touches tests/test_*.py, which look at the whole repository.
"""
import ast
import re
import subprocess
import sys
from pathlib import Path


def words_of(path, text):
    """(modules that a file imports, all else in it that may name a file, joined by lines)."""
    if path.suffix == ".sh":
        return set(), re.sub(r"(?m)^ *#.*", "", text)
    tree, modules, strings, said = ast.parse(text), set(), [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            said.add(node.value)        # a docstring
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in said:
            if path.parts[0] == "tests" or " " not in node.value:       # the product names files in messages as well
                strings.append(node.value)
    return modules, "\n".join(strings)


def reached(changed):
    """Sorted paths of test files in this repository. changed: paths, of files that may be gone."""
    listed = subprocess.run(["git", "ls-files"], check=True, text=True, capture_output=True).stdout
    files = list(map(Path, listed.splitlines()))
    tests = [path for path in files if path.parts[0] == "tests" and path.match("test_*.py")]
    words = {path: words_of(path, path.read_text()) for path in files if path.suffix in (".py", ".sh")}
    touched, todo = set(), set(map(Path, changed))
    while todo:
        path = todo.pop()
        touched.add(path)
        if path.suffix not in (".py", ".sh"):
            return sorted(tests)
        module = ".".join(path.with_suffix("").parts)
        names = [re.escape(path.name), re.escape(module)]
        if path.parts[:2] == ("tests", "helpers") and len(path.parts) > 3:
            names.append(path.parts[2])         # a folder that is named without its files
        named = re.compile(rf"(?<![\w.-])({'|'.join(names)})(?!\w)")
        now = {other for other, (imports, text) in words.items() if {module, path.stem} & imports or named.search(text)}
        if path.name == "conftest.py":
            now |= {other for other in tests if path.parent in other.parents}
        if path.parts[0] not in ("tests", "bench"):
            now |= {other for other in tests if len(other.parts) == 2}
        todo |= now - touched
    return sorted(touched & set(tests))


if __name__ == "__main__":
    print(*reached(sys.argv[1:]), sep="\n")
