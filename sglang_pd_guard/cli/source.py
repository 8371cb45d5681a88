"""Reads SGLang's source: which version it is, and which parameters a function takes, without importing any of it.

Importing SGLang's scheduler needs its GPU packages and takes seconds; its source says the same.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from pathlib import Path


class Source:
    """The SGLang that Python would import.

    Args:
        root: the folder of the package ``sglang``.
    """

    def __init__(self, root: Path):
        self.root = root

    @classmethod
    def find(cls) -> Source | None:
        """None where there is no SGLang on ``sys.path``."""
        spec = importlib.util.find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            return None
        return cls(Path(next(iter(spec.submodule_search_locations))).resolve())

    @functools.cached_property
    def version(self) -> str | None:
        """As ``sglang.version`` tells it; None where that cannot be told."""
        for name in ("_version", "version"):
            module = self._module(f"sglang.{name}")
            for node in ast.walk(module) if module else ():
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                    names = {target.id for target in node.targets if isinstance(target, ast.Name)}
                    if names & {"__version__", "version"} and isinstance(node.value.value, str):
                        return node.value.value
        try:
            return importlib.metadata.version("sglang")
        except importlib.metadata.PackageNotFoundError:
            return None

    @property
    def patches(self) -> list[str]:
        """The patches that the marker of ``pd-guard patch`` names; empty on SGLang as published."""
        marker = self._module("sglang.srt.disaggregation._pd_guard_patches")
        found = (node.value for node in (marker.body if marker else ()) if isinstance(node, ast.Assign))
        return list(ast.literal_eval(next(found, ast.Tuple([]))))

    def parameters(self, target: str) -> tuple[str, ...]:
        """The positional parameters of a function or method, by its dotted path.

        Raises:
            LookupError: there is no such thing; the message says what is missing.
        """
        path, _, name = target.rpartition(".")
        if self._module(path) is not None:
            found = self._in_module(path, name)
        else:
            module, _, owner = path.rpartition(".")
            if self._module(module) is None:
                raise LookupError(f"there is no module {module}")
            found = self._in_class(module, owner, name)
        if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            raise LookupError(f"{path} has no function {name}")
        return tuple(argument.arg for argument in [*found.args.posonlyargs, *found.args.args])

    def _in_class(self, module: str, owner: str, name: str) -> ast.AST | None:
        """The method `name` of a class, its own or the nearest base's."""
        home, node = self._class(module, owner)
        if node is None:
            raise LookupError(f"{module} has no class {owner}")
        if own := _definition(node.body, name):
            return own
        for base in node.bases:
            if isinstance(base, ast.Name) and (inherited := self._class(home, base.id)[1]) is not None:
                found = self._in_class(self._class(home, base.id)[0], inherited.name, name)
                if found is not None:
                    return found
        return None

    def _class(self, module: str, name: str) -> tuple[str, ast.ClassDef | None]:
        """A class and the module that defines it, through ``from x import y``."""
        tree = self._module(module)
        found = _definition(tree.body, name) if tree else None
        if isinstance(found, ast.ClassDef):
            return module, found
        if isinstance(found, ast.ImportFrom) and found.module and not found.level:
            real = next(alias.name for alias in found.names if (alias.asname or alias.name) == name)
            return self._class(found.module, real)
        return module, None

    def _in_module(self, module: str, name: str) -> ast.AST | None:
        found = _definition(self._module(module).body, name)
        if isinstance(found, ast.ImportFrom) and found.module and not found.level:
            real = next(alias.name for alias in found.names if (alias.asname or alias.name) == name)
            return self._in_module(found.module, real) if self._module(found.module) else None
        return found

    @functools.cache  # noqa: B019 - one Source per run
    def _module(self, module: str) -> ast.Module | None:
        first, _, rest = module.partition(".")
        if first != "sglang":
            return None
        base = self.root.joinpath(*rest.split(".")) if rest else self.root
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                try:
                    return ast.parse(path.read_bytes())
                except (SyntaxError, ValueError):
                    return ast.Module([], [])  # nothing in it can be imported
        return None


def _definition(body: list[ast.stmt], name: str) -> ast.AST | None:
    """The last function, class or import of this name in a body, also below ``if`` and ``try``."""
    found = None
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found = node if node.name == name else found
        elif isinstance(node, ast.ImportFrom):
            found = node if any((alias.asname or alias.name) == name for alias in node.names) else found
        elif isinstance(node, ast.If | ast.Try):
            handlers = [statement for handler in getattr(node, "handlers", ()) for statement in handler.body]
            found = _definition([*handlers, *node.orelse, *node.body], name) or found
    return found
