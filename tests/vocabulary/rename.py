"""Rename modules, classes, functions, parameters, variables and attributes by what mypy says that each name refers to.

    python tests/vocabulary/rename.py --python .venv/bin/python [--write] [TABLE …]

runs in the repository's root, with Python 3.12 or newer (earlier ones do not know where in an f-string a name is) and a mypy that is not
compiled (`pip install --no-deps` of its wheel for any platform): compiled visitors cannot be subclassed. It prints what it could not
rename, and COLLISION where a new name has another meaning in the same scope. Without --write nothing is changed. TABLE is by default
renames.txt beside this file; its format:

    [modules]                                            full names; a package moves with all of its modules
    swarmtrain.trainer.attended swarmtrain.trainer.instrumentation
    [typed]                                              each parameter, variable or attribute `here` of this class
    swarmtrain.trainer.runtime.Runtime:here runtime
    [swarmtrain.trainer.step]                            a module, by its name before the run
    Step StepResult                                      a class, function or global
    Step.unsound non_finite_reason                       a method or attribute, with what it overrides and what overrides it
    make_step:save request_save                          a parameter or local variable
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from mypy import build, nodes, types
from mypy.main import process_options
from mypy.traverser import TraverserVisitor

PLACES = ["swarmtrain", "tests", "benchmarks", "docs", "examples", "training_code.py", "datautils.py"]
OURS = ("swarmtrain", "benchmarks")


class Table:
    """What renames.txt says. A section is a module, or `modules` or `typed`; `OLD NEW` lines have OLD relative to the module."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.modules: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.locals: dict[str, str] = {}
        self.typed: dict[tuple[str, str], str] = {}
        self.used: set[str] = set()
        for path in paths:
            section = ""
            for number, line in enumerate(Path(path).read_text().splitlines(), 1):
                words = line.partition("#")[0].split()
                if line.startswith("["):
                    section = line.strip("[]")
                elif len(words) == 2:
                    self._add(section, *words)
                elif words:
                    sys.exit(f"{path}:{number}: two words: {line}")

    def _add(self, section: str, old: str, new: str) -> None:
        if section == "modules":
            self.modules[old] = new
        elif section == "typed":
            owner, _, name = old.rpartition(":")
            self.typed[owner, name] = new
        elif ":" in old:
            self.locals[f"{section}.{old}"] = new
        else:
            self.names[f"{section}.{old}"] = new


class Groups:
    """Attributes of classes that are one through inheritance."""

    def __init__(self, infos: list[nodes.TypeInfo]) -> None:
        self.parent: dict[str, str] = {}
        for info in infos:
            for name in info.names:
                key = f"{info.fullname}.{name}"
                for base in info.mro[1:]:
                    if name in base.names:
                        self._union(key, f"{base.fullname}.{name}")

    def find(self, key: str) -> str:
        while key in self.parent:
            key = self.parent[key]
        return key

    def _union(self, one: str, other: str) -> None:
        one, other = self.find(one), self.find(other)
        if one != other:
            self.parent[one] = other


class Project:
    def __init__(self, table: Table, python: str) -> None:
        self.table = table
        places = [p for p in PLACES if Path(p).exists()]
        files = [
            f
            for f in subprocess.run(["git", "ls-files", "-z", *places], capture_output=True, text=True, check=True).stdout.split("\0")
            if f.endswith(".py")
        ]
        sources, options = process_options(
            [
                f"--python-executable={python}",
                "--config-file=pyproject.toml",
                "--check-untyped-defs",
                "--no-incremental",
                "--follow-imports=skip",
                "--namespace-packages",
                "--explicit-package-bases",
                "--no-warn-unreachable",
                *files,
            ]
        )
        options.export_types = options.preserve_asts = True
        options.fast_module_lookup = True
        stems = [Path(f).stem for f in files if f.startswith("tests/")]
        # a test file's module is found by its name, as pytest does it
        for source in sources:
            if source.path and source.path.startswith("tests/"):
                stem = Path(source.path).stem
                source.module = stem if stems.count(stem) == 1 else source.path.removesuffix(".py").replace("/", ".")
        result = build.build(sources, options)
        self.errors = result.errors
        self.types = result.types
        paths = {str(Path(f).resolve()) for f in files}
        self.files = {
            name: state.tree for name, state in result.graph.items() if state.tree and str(Path(state.tree.path).resolve()) in paths
        }
        infos = [node for tree in self.files.values() for node in all_infos(tree)]
        self.groups = Groups(infos)
        self.new_of: dict[str, str] = {}
        for old, new in table.names.items():
            root = self.groups.find(old)
            if self.new_of.setdefault(root, new) != new:
                sys.exit(f"{old}: {new}, but {root}: {self.new_of[root]}")
        self.known = {f"{i.fullname}.{n}" for i in infos for n in i.names} | {f"{m}.{n}" for m, t in self.files.items() for n in t.names}

    def new_name(self, fullname: str | None) -> str | None:
        if not fullname:
            return None
        root = self.groups.find(fullname)
        if root in self.new_of:
            self.table.used.add(root)
            return self.new_of[root]
        return None


def all_infos(tree):
    found = []

    class V(TraverserVisitor):
        def visit_class_def(self, o):
            found.append(o.info)
            super().visit_class_def(o)

    tree.accept(V())
    return found


class Collect(TraverserVisitor):
    """Gather the edits of a file: {(line, column of bytes): (old, new)}, lines from 1."""

    def __init__(self, project: Project, module: str, tree: nodes.MypyFile) -> None:
        super().__init__()
        self.p, self.module, self.tree = project, module, tree
        self.text = Path(tree.path).read_text()
        self.lines = [line.encode() for line in self.text.split("\n")]
        self.edits: dict[tuple[int, int], tuple[str, str]] = {}
        self.warnings: list[str] = []
        self.scope = [module]
        self.vars: dict[int, str] = {}
        self.classes: list[nodes.TypeInfo] = []
        self.local_names: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.global_names: dict[str, dict[str, int]] = defaultdict(dict)
        self.members = {key.rpartition(".")[2] for key in project.table.names}

    # helpers
    def warn(self, line: int, text: str) -> None:
        self.warnings.append(f"{self.tree.path}:{line}: {text}")

    def edit(self, line: int, column: int, old: str, new: str) -> None:
        if old == new:
            return
        text = self.lines[line - 1][column : column + len(old)] if 0 < line <= len(self.lines) else b""
        if text != old.encode() and 0 < line <= len(self.lines):  # `*name`, or an f-string with characters of several bytes
            word = re.compile(rb"(?<!\w)" + old.encode() + rb"(?!\w)")
            near = [
                m.start()
                for m in word.finditer(self.lines[line - 1])
                if abs(m.start() - column) <= 16 and (line, m.start()) not in self.edits
            ]
            if near:
                column = min(near, key=lambda start: abs(start - column))
                text = old.encode()
        if text != old.encode():
            self.warn(line, f"expected {old} at column {column}, found {text!r}; not renamed to {new}")
            return
        self.edits[line, column] = (old, new)

    def after(self, line: int, column: int, name: str) -> tuple[int, int] | None:
        """Return where `name` stands as a word from a place on, within a few lines."""
        for number in range(line, min(line + 40, len(self.lines) + 1)):
            text = self.lines[number - 1]
            found = re.compile(rb"(?<![\w.])" + name.encode() + rb"(?!\w)").search(text, column if number == line else 0)
            if found:
                return number, found.start()
        return None

    def local_new(self, var: nodes.Var) -> str | None:
        key = self.vars.get(id(var))
        table = self.p.table
        if key in table.locals:
            table.used.add(key)
            return table.locals[key]
        return self.typed_new(var)

    def typed_new(self, var: nodes.Var) -> str | None:
        table = self.p.table
        name = var.name.rstrip("'*")
        for item in flat(var.type):
            if isinstance(item, types.Instance):
                for base in item.type.mro:
                    if (base.fullname, name) in table.typed:
                        table.used.add(f"{base.fullname}:{name}")
                        return table.typed[base.fullname, name]
        return None

    # definitions
    def visit_mypy_file(self, o):
        super().visit_mypy_file(o)

    def visit_class_def(self, o):
        new = self.p.new_name(o.fullname)
        if new:
            place = self.after(o.line, 0, "class")
            place = self.after(*(place[0], place[1] + 5), o.name) if place else None
            if place:
                self.edit(*place, o.name, new)
        self.scope.append(o.name)
        self.classes.append(o.info)
        super().visit_class_def(o)
        self.classes.pop()
        self.scope.pop()

    def visit_func_def(self, o):
        new = self.p.new_name(o.fullname) if not self.in_function() else self.p.table.locals.get(f"{'.'.join(self.scope)}:{o.name}")
        if new:
            place = self.after(o.line, 0, "def")
            place = self.after(place[0], place[1] + 3, o.name) if place else None
            if place:
                self.edit(*place, o.name, new)
        self.scope.append(o.name)
        full = ".".join(self.scope)
        for argument in o.arguments:
            self.vars[id(argument.variable)] = f"{full}:{argument.variable.name}"
            if argument.line > 0 and argument.variable.name and (changed := self.local_new(argument.variable)):
                self.edit(argument.line, argument.column, argument.variable.name, changed)
                self.p.renamed_args[o.fullname, argument.variable.name] = changed
            if argument.line > 0:
                self.local_names[full][self.local_new(argument.variable) or argument.variable.name].add(argument.variable.name)
        super().visit_func_def(o)
        self.scope.pop()

    def visit_lambda_expr(self, o):
        full = ".".join(self.scope)
        for argument in o.arguments:
            self.vars[id(argument.variable)] = f"{full}:{argument.variable.name}"
            if (changed := self.local_new(argument.variable)) and argument.line > 0:
                self.edit(argument.line, argument.column, argument.variable.name, changed)
        super().visit_lambda_expr(o)

    def visit_nonlocal_decl(self, o):
        for name in o.names:
            for depth in range(len(self.scope) - 1, 0, -1):
                new = self.p.table.locals.get(f"{'.'.join(self.scope[:depth])}:{name}")
                if new and (place := self.after(o.line, o.column, name)):
                    self.edit(*place, name, new)
                    break

    def in_function(self) -> bool:
        return any(isinstance(x, str) and x.startswith("<") for x in self.scope) or self._function_depth() > 0

    def _function_depth(self) -> int:
        # the scope has classes and functions; a scope name that is not a class is a function
        return len(self.scope) - 1 - len(self.classes)

    # uses
    def visit_name_expr(self, o):  # noqa: PLR0912  # a branch for each kind of name
        node = o.node
        name = o.name.rstrip("'*")
        new = None
        if isinstance(node, nodes.MypyFile):
            old = node.fullname
            if old in self.p.moved and old.rpartition(".")[2] == name:
                new = self.p.moved[old].rpartition(".")[2]
        elif isinstance(node, nodes.Var) and (o.kind == nodes.LDEF or node.fullname == node.name or "." not in node.fullname):
            self.vars.setdefault(id(node), f"{'.'.join(self.scope)}:{name}")
            new = self.local_new(node)
        elif isinstance(node, nodes.FuncBase) and o.kind == nodes.LDEF:
            for depth in range(len(self.scope), 0, -1):
                key = f"{'.'.join(self.scope[:depth])}:{name}"
                if key in self.p.table.locals:
                    self.p.table.used.add(key)
                    new = self.p.table.locals[key]
                    break
            else:  # imported in this function
                new = self.p.new_name(node.fullname) if node.fullname.rpartition(".")[2] == name else None
        else:
            full = o.fullname or (node.fullname if node is not None else None)
            if full and full.rpartition(".")[2] == name:
                new = self.p.new_name(full)
            if new is None and isinstance(node, nodes.Var):
                new = self.typed_new(node) if self.classes or o.kind == nodes.MDEF else None
            if self.classes and new is None and self._function_depth() == 0:
                for info in reversed(self.classes):
                    new = self.p.new_name(f"{info.fullname}.{name}")
                    break
        scope = ".".join(self.scope)
        if isinstance(node, nodes.Var) and o.kind == nodes.LDEF:
            self.local_names[scope][new or name].add(name)
        elif self._function_depth() > 0:
            self.global_names[scope].setdefault(new or name, o.line)
        if new:
            self.edit(o.line, o.column, name, new)

    def visit_member_expr(self, o):
        super().visit_member_expr(o)
        if not (wanted := self.member_new(o)):
            return
        line, column = o.end_line, o.end_column - len(o.name)
        self.edit(line, column, o.name, wanted)

    def member_new(self, o) -> str | None:
        if isinstance(o.expr, nodes.RefExpr) and isinstance(o.expr.node, nodes.MypyFile):
            return self.p.new_name(f"{o.expr.node.fullname}.{o.name}")
        if isinstance(o.expr, nodes.RefExpr) and isinstance(o.expr.node, nodes.TypeInfo):
            return self.attribute(o.expr.node, o.name, o)
        kind = self.p.types.get(o.expr)
        answers = set()
        for item in flat(kind):
            info = instance_info(item)
            if info is None:
                if isinstance(item, types.AnyType) and o.name in self.members:
                    self.warn(o.line, f".{o.name} of a value of unknown type")
                continue
            answers.add(self.attribute(info, o.name, o))
        if len(answers) > 1:
            self.warn(o.line, f".{o.name}: {answers}")
        return next((a for a in answers if a), None)

    def attribute(self, info, name, o) -> str | None:
        for base in info.mro:
            if name in base.names:
                new = self.p.new_name(f"{base.fullname}.{name}")
                node = base.names[name].node
                if new is None and isinstance(node, nodes.Var):
                    new = self.typed_new(node)
                return new
        return None

    def visit_call_expr(self, o):
        super().visit_call_expr(o)
        named = [
            (n, a) for n, a, k in zip(o.arg_names, o.args, o.arg_kinds, strict=True) if n and k in (nodes.ARG_NAMED, nodes.ARG_NAMED_OPT)
        ]
        if not named:
            return
        for name, argument in named:
            new = self.keyword_new(o, name)
            if new:
                self.keyword(argument, name, new)

    def keyword(self, argument, name, new) -> None:
        line, column = argument.line, argument.column
        for number in range(line, max(line - 30, 0), -1):
            text = self.lines[number - 1][: column if number == line else None]
            found = list(re.compile(rb"(?<![\w.])" + name.encode() + rb"\s*=(?!=)").finditer(text))
            if found:
                self.edit(number, found[-1].start(), name, new)
                return
        self.warn(line, f"keyword {name}= not found")

    def keyword_new(self, o, name) -> str | None:  # noqa: PLR0911, PLR0912  # a branch for each kind of callee
        callee = o.callee
        if isinstance(callee, nodes.IndexExpr):
            callee = callee.base
        if isinstance(callee, nodes.RefExpr) and callee.fullname in ("dataclasses.replace", "copy.replace") and o.args:
            for item in flat(self.p.types.get(o.args[0])):
                if (info := instance_info(item)) and (new := self.attribute(info, name, o)):
                    return new
            return None
        if isinstance(callee, nodes.RefExpr) and isinstance(callee.node, nodes.TypeAlias):
            target = types.get_proper_type(callee.node.target)
            if isinstance(target, types.Instance):
                return self.of_class(target.type, name, o)
        if isinstance(callee, nodes.RefExpr) and isinstance(callee.node, nodes.TypeInfo):
            return self.of_class(callee.node, name, o)
        if isinstance(callee, nodes.SuperExpr) or (isinstance(callee, nodes.MemberExpr) and callee.name == "__init__"):
            pass
        if isinstance(callee, nodes.RefExpr) and callee.fullname == "functools.partial" and o.args:
            callee = o.args[0]
            if isinstance(callee, nodes.RefExpr) and isinstance(callee.node, nodes.TypeInfo):
                return self.of_class(callee.node, name, o)
        definition = None
        node = callee.node if isinstance(callee, nodes.RefExpr) else None
        if isinstance(node, (nodes.FuncDef, nodes.OverloadedFuncDef)):
            definition = node
        elif isinstance(node, nodes.Decorator):
            definition = node.func
        else:
            kind = types.get_proper_type(self.p.types.get(callee))
            if isinstance(kind, types.CallableType):
                if kind.is_type_obj():
                    return self.of_class(kind.type_object(), name, o)
                definition = kind.definition
                if isinstance(definition, nodes.Decorator):
                    definition = definition.func
            elif isinstance(kind, types.Instance) and (call := kind.type.get("__call__")):
                definition = call.node
        if isinstance(definition, nodes.FuncDef):
            return self.of_function(definition, name)
        if isinstance(callee, nodes.MemberExpr):  # a bound method has no definition
            for item in flat(self.p.types.get(callee.expr)):
                info = instance_info(item)
                for base in info.mro if info else ():
                    if callee.name in base.names:
                        found = base.names[callee.name].node
                        found = found.func if isinstance(found, nodes.Decorator) else found
                        if isinstance(found, nodes.FuncDef):
                            return self.of_function(found, name)
                        break
        return None

    def of_class(self, info, name, o) -> str | None:
        init = info.get("__init__")
        if init and isinstance(init.node, nodes.FuncDef) and init.node.line > 0 and init.node.info.fullname.startswith(OURS):
            return self.of_function(init.node, name)
        return self.attribute(info, name, o)

    def of_function(self, definition, name) -> str | None:
        table = self.p.table
        for argument in definition.arguments:
            if argument.variable.name == name:
                key = f"{definition.fullname}:{name}"
                if key in table.locals:
                    return table.locals[key]
                return self.typed_new(argument.variable)
        return None

    def visit_global_decl(self, o):
        for name in o.names:
            if self.p.new_name(f"{self.module}.{name}"):
                place = self.after(o.line, 0, name)
                self.edit(*place, name, self.p.new_name(f"{self.module}.{name}"))

    def check_collisions(self) -> None:
        for scope, names in self.local_names.items():
            for new, olds in names.items():
                if len(olds) > 1:
                    self.warn(0, f"COLLISION in {scope}: {sorted(olds)} all become {new}")
                if new in self.global_names[scope] and olds != {new}:
                    self.warn(self.global_names[scope][new], f"COLLISION in {scope}: local {sorted(olds)} becomes {new}, a global there")
                elif new in self.global_names[scope] and olds == {new}:
                    self.warn(self.global_names[scope][new], f"COLLISION in {scope}: a global becomes {new}, a local there")
        top = {}
        for name, symbol in self.tree.names.items():
            full = symbol.node.fullname if symbol.node is not None else None
            new = (self.p.new_name(full) if full and full.rpartition(".")[2] == name else None) or name
            if new in top:
                self.warn(0, f"COLLISION of globals: {top[new]} and {name} are {new}")
            top[new] = name

    # imports: mypy keeps no columns of names
    def finish(self) -> None:
        p = self.p
        tree = ast.parse(self.text)
        package = self.module if self.tree.path.endswith("__init__.py") else self.module.rpartition(".")[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    up = package.split(".")
                    base = ".".join(x for x in [*up[: len(up) - node.level + 1], node.module or ""] if x)
                for alias in node.names:
                    full = f"{base}.{alias.name}"
                    full = p.origin.get(full, full)
                    new = p.new_name(full)
                    if new and full.rpartition(".")[2] == alias.name:
                        self.edit(alias.lineno, alias.col_offset, alias.name, new)
                        if alias.asname is None:
                            pass
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets) and isinstance(node.value, (ast.List, ast.Tuple)):
                    for item in node.value.elts:
                        if isinstance(item, ast.Constant) and isinstance(item.value, str):
                            full = p.origin.get(f"{self.module}.{item.value}", f"{self.module}.{item.value}")
                            if new := p.new_name(full):
                                self.edit(item.lineno, item.col_offset + 1, item.value, new)
            # annotations are not expressions for mypy
            for child in annotations(node):
                self.annotation(child)
        # annotations in the text are strings for `from __future__ import annotations`; mypy keeps their types, not their places

    def annotation(self, node) -> None:
        for child in ast.walk(node):
            if isinstance(child, ast.Name):
                full = self.resolve(child.id)
                if full and (new := self.p.new_name(full)):
                    self.edit(child.lineno, child.col_offset, child.id, new)
            elif isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name):
                base = self.resolve(child.value.id)
                if base in self.p.moved and base.rpartition(".")[2] == child.value.id:
                    self.edit(child.lineno, child.col_offset, child.value.id, self.p.moved[base].rpartition(".")[2])
                if base and (new := self.p.new_name(f"{base}.{child.attr}")):
                    self.edit(child.end_lineno, child.end_col_offset - len(child.attr), child.attr, new)
            elif isinstance(child, ast.Constant) and isinstance(child.value, str) and child.value.isidentifier():
                full = self.resolve(child.value)
                if full and (new := self.p.new_name(full)):
                    self.edit(child.lineno, child.col_offset + 1, child.value, new)

    def resolve(self, name: str) -> str | None:
        found = self.tree.names.get(name)
        if found is None or found.node is None:
            return None
        return found.node.fullname


def annotations(node):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        a = node.args
        for x in [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]:
            if x is not None and x.annotation is not None:
                yield x.annotation
        if node.returns is not None:
            yield node.returns
    elif isinstance(node, ast.AnnAssign):
        yield node.annotation
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("cast", "TypeVar", "NewType") and node.args:
        yield from node.args
        yield from (k.value for k in node.keywords)


def flat(kind):
    kind = types.get_proper_type(kind)
    if kind is None:
        return []
    if isinstance(kind, types.UnionType):
        return [x for item in kind.items for x in flat(item)]
    return [kind]


def instance_info(kind):  # noqa: PLR0911  # a branch for each kind of type
    kind = types.get_proper_type(kind)
    if isinstance(kind, types.Instance):
        return kind.type
    if isinstance(kind, types.TypeVarType):
        return instance_info(kind.upper_bound)
    if isinstance(kind, types.TypeType):
        return instance_info(kind.item)
    if isinstance(kind, types.CallableType) and kind.is_type_obj():
        return kind.type_object()
    if isinstance(kind, types.TupleType):
        return kind.partial_fallback.type
    if isinstance(kind, types.LiteralType):
        return kind.fallback.type
    return None


def main() -> int:
    a = argparse.ArgumentParser()
    a.add_argument("tables", nargs="*", default=[str(Path(__file__).with_name("renames.txt"))])
    a.add_argument("--write", action="store_true")
    a.add_argument("--python", default=".venv/bin/python")
    a.add_argument("--errors", action="store_true")
    o = a.parse_args()
    table = Table(o.tables)
    p = Project(table, o.python)
    if o.errors:
        print("\n".join(p.errors))
    p.renamed_args = {}
    p.moved = complete(table.modules, {name: tree.path for name, tree in p.files.items()})
    p.origin = {}
    for module, tree in p.files.items():
        for name, symbol in tree.names.items():
            if symbol.node is not None and symbol.node.fullname:
                p.origin[f"{module}.{name}"] = symbol.node.fullname
    count = files = 0
    notes: list[str] = []
    for module, tree in sorted(p.files.items()):
        visitor = Collect(p, module, tree)
        tree.accept(visitor)
        visitor.finish()
        visitor.check_collisions()
        notes += visitor.warnings
        if visitor.edits:
            files += 1
            count += len(visitor.edits)
            lines = list(visitor.lines)
            for (line, column), (old, new) in sorted(visitor.edits.items(), reverse=True):
                text = lines[line - 1]
                lines[line - 1] = text[:column] + new.encode() + text[column + len(old) :]
            if o.write:
                Path(tree.path).write_bytes(b"\n".join(lines))
    asked = {p.groups.find(x) for x in table.names} | set(table.locals) | {f"{c}:{n}" for c, n in table.typed}
    for unused in sorted(asked - table.used):
        notes.append(f"never met: {unused}")
    print("\n".join(notes))
    print(f"{count} edits in {files} files")
    if o.write:
        move(table.modules, {name: str(Path(tree.path)) for name, tree in p.files.items()})
    return 0


def complete(modules: dict[str, str], files: dict[str, str]) -> dict[str, str]:
    """Return old -> new for every module of the project that moves; `files`: path by module."""
    out = {}
    for name in files:
        prefix, rest = name, ""
        while prefix:
            if prefix in modules:
                new = modules[prefix] + rest
                if new != name:
                    out[name] = new
                break
            prefix, _, last = prefix.rpartition(".")
            rest = f".{last}{rest}"
    return out


def move(modules: dict[str, str], files: dict[str, str]) -> None:  # noqa: PLR0912  # files, folders and three kinds of text
    """Move files, and rewrite imports and dotted names of modules in every text file of the repository."""
    if not modules:
        return
    moved = complete(modules, files)
    for old, new in moved.items():
        source = Path(files[old])
        if "." not in old:  # a helper of tests: in its own folder
            target = source.with_name(f"{new}.py")
        elif source.name == "__init__.py":
            target = Path(*new.split("."), "__init__.py")
        else:
            target = Path(*new.split(".")).with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", str(source), str(target)], check=True)
    for old, new in modules.items():  # assets: files that are not modules
        folder = Path(*old.split("."))
        if folder.is_dir():
            left = subprocess.run(["git", "ls-files", str(folder)], capture_output=True, text=True, check=True).stdout.split()
            for name in left:
                target = Path(*new.split("."), *Path(name).relative_to(folder).parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["git", "mv", name, str(target)], check=True)
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=True).stdout.split("\0")
    leaves = {old: new for old, new in moved.items() if "." in old and not files[old].endswith("__init__.py")}
    order = sorted(leaves, key=len, reverse=True)
    dotted = re.compile(r"(?<![\w.])(" + "|".join(re.escape(x) for x in order) + r")(?!\w)") if leaves else None
    slashed = re.compile(r"(?<!\w)(" + "|".join(re.escape(x.replace(".", "/")) for x in order) + r")(?=\.py\b)") if leaves else None
    bare = {old: new for old, new in moved.items() if "." not in old}
    helper = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, bare)) + r")(?=\.py\b)") if bare else None
    for name in listed:
        path = Path(name)
        if not name or not path.is_file() or path.is_symlink():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        new = text
        if name.endswith(".py"):
            new = from_imports(new, moved)
        if dotted:
            new = dotted.sub(lambda m: leaves[m[1]], new)
            new = slashed.sub(lambda m: leaves[m[1].replace("/", ".")].replace(".", "/"), new)
        if helper:
            new = helper.sub(lambda m: bare[m[1]], new)
        if new != text:
            path.write_text(new)


def from_imports(text: str, moved: dict[str, str]) -> str:
    """Rewrite the imports of modules that moved. Names that `from package import module` binds are renamed by the caller."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    lines = [x.encode() for x in text.split("\n")]
    edits: list[tuple[int, int, int, int, bytes]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in moved:
                    edits.append(
                        (alias.lineno, alias.col_offset, alias.lineno, alias.col_offset + len(alias.name), moved[alias.name].encode())
                    )
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        kept: list[str] = []
        out: list[str] = []
        package = moved.get(node.module, node.module)
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            suffix = f" as {alias.asname}" if alias.asname else ""
            if full in moved:
                target, _, last = moved[full].rpartition(".")
                out.append(f"from {target} import {last}{suffix}")
            else:
                kept.append(alias.name + suffix)
        if out or package != node.module:
            indent = " " * node.col_offset
            first = [f"from {package} import {', '.join(kept)}"] if kept else []
            joined = f"\n{indent}".join([*first, *out])
            edits.append((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, joined.encode()))
    for l1, c1, l2, c2, new in sorted(set(edits), reverse=True):
        head, tail = lines[l1 - 1][:c1], lines[l2 - 1][c2:]
        lines[l1 - 1 : l2] = [head + new + tail]
    return b"\n".join(lines).decode()


if __name__ == "__main__":
    sys.exit(main())
