r"""What can touch a test file, as one short hash of it: bench/machines.sh does not run a part again while that stays.

    python bench/reached.py        # in the repository; a line for each test file

A Python file is touched by what it imports and by what a string in it names (a file, or a module with its package), a
bash script by the scripts that it names. A conftest.py touches the tests beside and below it; other kinds of files
touch all, but documents and results touch none. What is outside tests/ and bench/ touches tests/test_*.py, which look
at the whole repository.
"""
import ast
import hashlib
import re
import subprocess
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


def touched_by(path, tests, words):
    """Files that a change of `path` touches at once. words: {path: words_of()} of Python files and bash scripts."""
    if path.suffix not in (".py", ".sh"):
        return set(tests)
    module = ".".join(path.with_suffix("").parts)
    names = [path.name, module]
    if path.parts[:2] == ("tests", "helpers") and len(path.parts) > 3:
        names.append(path.parts[2])         # a folder that is named without its files
    named = re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, names))})(?!\w)")
    now = {other for other, (imports, text) in words.items() if {module, path.stem} & imports
           or any(name in text for name in names) and named.search(text)}
    if path.name == "conftest.py":
        now |= {other for other in tests if path.parent in other.parents}
    if path.parts[0] not in ("tests", "bench"):
        now |= {other for other in tests if len(other.parts) == 2}
    return now


def contents():
    """{test file: 12 hex digits that change with any file that can touch it}, of what git has in its index."""
    listed = subprocess.run(["git", "ls-files", "--stage"], check=True, text=True, capture_output=True).stdout
    blobs = {Path(name): about for about, name in (line.split("\t") for line in listed.splitlines())
             if not name.startswith("bench/results/") and not re.search(r"\.md$|^docs/.*\.png$", name)}
    tests = [path for path in blobs if path.parts[0] == "tests" and path.match("test_*.py")]
    words = {path: words_of(path, path.read_text()) for path in blobs if path.suffix in (".py", ".sh")}
    edges, hashes = {path: touched_by(path, tests, words) for path in blobs}, {path: hashlib.sha256() for path in tests}
    for path in sorted(blobs):
        touched, todo = set(), {path}
        while todo:
            touched |= todo
            todo = set().union(*(edges[other] for other in todo)) - touched
        for test in touched.intersection(tests):
            hashes[test].update(f"{path} {blobs[path]}\n".encode())
    return {str(path): digest.hexdigest()[:12] for path, digest in hashes.items()}


if __name__ == "__main__":
    for test, content in sorted(contents().items()):
        print(content, test)
