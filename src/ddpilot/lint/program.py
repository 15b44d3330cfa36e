# SPDX-License-Identifier: Apache-2.0
"""`Program`: one parsed file, with what its names, attributes and calls may stand for.

Names are resolved through imports, assignments, attributes, parameters and functions of the same file, so that a rule
finds a `DistributedDataParallel` whatever it is called. All answers are approximations: an expression may have any of
the values that `trace` yields, and what the file does not show is left out.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property

from ddpilot.lint.scopes import Binding, Function, ScopedTree

_SHORT_NAMES = {
    "torch.nn.DataParallel": "DataParallel",
    "torch.nn.parallel.DataParallel": "DataParallel",
    "torch.nn.parallel.data_parallel.DataParallel": "DataParallel",
    "torch.nn.parallel.DistributedDataParallel": "DDP",
    "torch.nn.parallel.distributed.DistributedDataParallel": "DDP",
    "torch.utils.data.DataLoader": "DataLoader",
    "torch.utils.data.dataloader.DataLoader": "DataLoader",
    "torch.utils.data.distributed.DistributedSampler": "DistributedSampler",
    "torch.utils.data.DistributedSampler": "DistributedSampler",
    "torch.utils.data.IterableDataset": "IterableDataset",
    "torch.utils.data.dataset.IterableDataset": "IterableDataset",
    "torch.distributed.distributed_c10d.init_process_group": "torch.distributed.init_process_group",
    "accelerate.accelerator.Accelerator": "accelerate.Accelerator",
}
SAME_MODEL_METHODS = frozenset(
    {
        "to",
        "cuda",
        "cpu",
        "xpu",
        "train",
        "eval",
        "half",
        "float",
        "double",
        "bfloat16",
        "requires_grad_",
        "share_memory",
    }
)
"""Methods of a module that return the module."""
_SAME_ARGUMENT = frozenset(
    {"torch.compile", "torch.nn.SyncBatchNorm.convert_sync_batchnorm", "tqdm.tqdm", "tqdm.auto.tqdm", "iter", "tqdm"}
)
"""Functions that return their first argument, or one that behaves like it."""
_STARTERS = {"torch.multiprocessing.spawn": 1, "torch.multiprocessing.start_processes": 1}
"""Functions that call their first argument with `args=`, and how many arguments they put before those."""
_MAX_TRACED = 400


class Program(ScopedTree):
    """One parsed file. Raises `SyntaxError`, `ValueError` or `RecursionError` if `text` cannot be parsed."""

    def __init__(self, text: str, cells: Sequence[range] = ()) -> None:
        super().__init__(text, cells)
        self._names: dict[ast.AST, str] = {}
        self._callees: dict[ast.Call, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        self._attribute_values: dict[ast.Attribute, list[Binding]] = {}
        self._traces: dict[ast.AST, Sequence[ast.AST]] = {}
        self._open: set[ast.AST] = set()
        """Nodes that are being traced: a name may lead back to itself."""
        self._sites_are_known = False
        self._sites: dict[ast.AST, list[tuple[ast.Call, int]]] | None = None

    def calls_inside(self, node: ast.AST) -> Iterator[ast.Call]:
        """Yield the calls inside `node`, and those of the functions of this file that it calls, each function once."""
        done: set[ast.AST] = set()
        stack = [node]
        while stack:
            each = stack.pop()
            if each in done:
                continue
            done.add(each)
            for call in [each] if isinstance(each, ast.Call) else self.inside(each, ast.Call):
                assert isinstance(call, ast.Call)
                yield call
                stack += self.callees(call)

    # What an expression is

    @cached_property
    def calls(self) -> dict[str, list[ast.Call]]:
        """All calls by the full name of the function, such as ``torch.save``; methods by ``.name``."""
        found: dict[str, list[ast.Call]] = defaultdict(list)
        for call in self.nodes[ast.Call]:
            assert isinstance(call, ast.Call)
            name = self.name_of(call)
            found[name].append(call)
            if isinstance(call.func, ast.Attribute) and not name:
                found[f".{call.func.attr}"].append(call)
        return found

    def calls_to(self, *names: str) -> list[ast.Call]:
        """Return the calls of the functions or methods `names`, in the order of the file."""
        found = [call for name in names for call in self.calls.get(name, ())]
        return sorted(found, key=lambda call: (call.lineno, call.col_offset))

    def name_of(self, node: ast.AST) -> str:
        """Return the full name of an imported function, class or module, or of that which a call calls.

        ``torch.nn.parallel.DistributedDataParallel`` is ``DDP``, also through subclasses of this file; see
        `_SHORT_NAMES`. Builtins have their name. Empty if unknown, and for functions of this file.
        """
        if isinstance(node, ast.Call):
            return self.name_of(node.func)
        if node not in self._names:
            self._names[node] = ""  # for a name that is bound to itself
            self._names[node] = self._resolve_name(node)
        return self._names[node]

    def _resolve_name(self, node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            base = "" if isinstance(node.value, ast.Call) else self.name_of(node.value)
            dotted = f"{base}.{node.attr}" if base else ""
        elif isinstance(node, ast.Name):
            bindings = self.bindings(node)
            if not bindings:
                dotted = next((f"{star}.{node.id}" for star in self.stars if _is_known(star, node.id)), node.id)
            else:
                dotted = next(filter(None, map(self._name_of_binding, bindings)), "")
        elif isinstance(node, ast.Call) and self.name_of(node.func) == "functools.partial" and node.args:
            dotted = self.name_of(node.args[0])
        else:
            dotted = ""
        return _SHORT_NAMES.get(dotted, dotted)

    def _name_of_binding(self, binding: Binding) -> str:
        if binding.kind == "import":
            return binding.dotted
        if isinstance(binding.value, ast.ClassDef):
            return next(filter(None, map(self.name_of, binding.value.bases)), "")
        if binding.kind == "value" and isinstance(binding.value, (ast.Name, ast.Attribute)) and binding.index is None:
            return self.name_of(binding.value)
        if binding.kind == "value" and self.name_of(binding.value or ast.Pass()) == "functools.partial":
            return self._resolve_name(binding.value or ast.Pass())
        return ""

    def trace(self, node: ast.AST) -> Sequence[ast.AST]:
        """Return `node` and the expressions, functions and classes whose value it may have, nearest first."""
        if self._sites_are_known and node in self._traces:
            return self._traces[node]
        if node in self._open:
            return ()
        self._open.add(node)
        found = list(self._follow(node))
        self._open.remove(node)
        if self._sites_are_known:
            self._traces[node] = found
        return found

    def _follow(self, node: ast.AST) -> Iterator[ast.AST]:
        queue: list[tuple[ast.AST, int | None]] = [(node, None)]
        seen: set[tuple[ast.AST, int | None]] = set()
        while queue and len(seen) < _MAX_TRACED:
            each, which = queue.pop(0)
            if (each, which) in seen:
                continue
            seen.add((each, which))
            if which is None or isinstance(each, ast.Call):
                yield each
            queue += self._steps(each, which)

    def _steps(self, node: ast.AST, index: int | None) -> Iterator[tuple[ast.AST, int | None]]:
        """Yield what `node`, or its element `index`, may be the value of."""
        match node:
            case ast.Name():
                yield from self._values(self.bindings(node))
            case ast.Attribute():
                if node not in self._attribute_values:
                    self._attribute_values[node] = []  # for an attribute that is assigned from itself
                    self._attribute_values[node] = self._attribute_bindings(node)
                yield from self._values(self._attribute_values[node])
            case ast.IfExp():
                branches = [node.body, node.orelse]
                modules = [each for each in branches if isinstance(each, ast.Attribute) and each.attr == "module"]
                yield from ((each, index) for each in modules or branches)
            case ast.BoolOp():
                yield from ((each, index) for each in node.values)
            case ast.Await() | ast.NamedExpr() | ast.Starred():
                yield node.value, index
            case ast.Tuple() | ast.List() if index is not None and index < len(node.elts):
                yield node.elts[index], None
            case ast.Subscript(slice=ast.Constant(value=key)):
                yield from self._items(node.value, key)
            case ast.Call():
                for callee in self.callees(node):
                    for returned in self.inside(callee, ast.Return):
                        assert isinstance(returned, ast.Return)
                        if returned.value is not None:
                            yield returned.value, index
                if isinstance(node.func, ast.Attribute) and node.func.attr in SAME_MODEL_METHODS and index is None:
                    yield node.func.value, None
                elif node.args and self.name_of(node) in _SAME_ARGUMENT:
                    yield node.args[0], index

    def _values(self, bindings: Sequence[Binding]) -> Iterator[tuple[ast.AST, int | None]]:
        for binding in bindings:
            if binding.kind == "param":
                assert isinstance(binding.value, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from ((value, None) for value in self.arguments_for(binding.value, binding.dotted))
            elif binding.kind in ("value", "def") and binding.value is not None:
                yield binding.value, binding.index

    def _items(self, value: ast.expr, key: object) -> Iterator[tuple[ast.AST, int | None]]:
        for each in self.trace(value):
            if isinstance(each, ast.Dict):
                pairs = zip(each.keys, each.values, strict=True)
                yield from ((v, None) for k, v in pairs if isinstance(k, ast.Constant) and k.value == key)
            elif isinstance(each, (ast.Tuple, ast.List)) and isinstance(key, int) and -1 <= key < len(each.elts):
                yield each.elts[key], None

    def _attribute_bindings(self, node: ast.Attribute) -> list[Binding]:
        """Return what is assigned to an attribute of ``self``, of an instance of a class of this file, or by name."""
        scope = self._scopes[self._scope_node(node)]
        owner = self._owner(node.value, scope)
        if owner is None and not self._has_attribute(node.attr):
            return []
        if owner is None:
            owner = next((each for each in self.instances(node.value)), None)
        found: list[Binding] = []
        for each in self._bases(owner):
            bound = self._attributes.get((each, node.attr), [])
            for method in dict.fromkeys(self.function_of(binding.statement) for binding in bound):
                here = [binding for binding in bound if self.function_of(binding.statement) is method]
                is_here = self.function_of(node) is method
                found += self._reaching(here, node if is_here else None, method)
        if found and any(self.function_of(binding.statement) is self.function_of(node) for binding in found):
            found = [b for b in found if self.function_of(b.statement) is self.function_of(node)] or found
        if isinstance(owner, ast.ClassDef):
            properties = [
                f for f in self.functions.get(node.attr, ()) if self.class_of(f) is owner and f.decorator_list
            ]
            for each in properties:
                found += [
                    Binding(r, "value", r.value) for r in self.inside(each, ast.Return) if isinstance(r, ast.Return)
                ]
        return found

    def is_added_to(self, node: ast.Attribute) -> bool:
        """Return True if an attribute of this name is counted up, as by ``self.count += n``."""
        named = (bound for (_, name), some in self._attributes.items() if name == node.attr for bound in some)
        return any(binding.kind == "update" for binding in named)

    def _has_attribute(self, name: str) -> bool:
        return any(attribute == name for _, attribute in self._attributes) or name in self.functions

    def _bases(self, owner: ast.AST | None) -> Iterator[ast.AST | None]:
        yield owner
        if isinstance(owner, ast.ClassDef):
            for base in owner.bases:
                for each in self.trace(base):
                    if isinstance(each, ast.ClassDef) and each is not owner:
                        yield each

    def instances(self, node: ast.AST) -> Iterator[ast.ClassDef]:
        """Yield the classes of this file of which `node` may be an instance."""
        for each in self.trace(node):
            if isinstance(each, ast.Call):
                yield from (made for made in self.trace(each.func) if isinstance(made, ast.ClassDef))

    def callees(self, call: ast.Call) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Return the functions of this file that `call` calls: by name, or methods of ``self`` and of instances."""
        if call not in self._callees:
            self._callees[call] = []  # for functions that call themselves
            self._callees[call] = self._find_callees(call)
        return self._callees[call]

    def _find_callees(self, call: ast.Call) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        if isinstance(call.func, ast.Name) and call.func.id in self.functions:
            values = [each.value for each in self.bindings(call.func) if each.kind == "def"]
            return [each for each in values if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
        if isinstance(call.func, ast.Attribute) and call.func.attr in self.functions:
            owner = self._owner(call.func.value, self._scopes[self._scope_node(call)])
            owners = {owner} if owner is not None else set(self.instances(call.func.value))
            return [each for each in self.functions[call.func.attr] if self.class_of(each) in owners]
        return []

    def _find_call_sites(self) -> dict[ast.AST, list[tuple[ast.Call, int]]]:
        """Return the calls of each function of this file, with the number of arguments that are bound before those."""
        if self._sites is None:
            self._sites = defaultdict(list)
            calls = [each for each in self.nodes[ast.Call] if isinstance(each, ast.Call)]
            # Names first: to find the instances whose methods are called, their parameters are traced.
            for call in sorted(calls, key=lambda each: not isinstance(each.func, ast.Name)):
                for callee in self.callees(call):
                    is_method = isinstance(call.func, ast.Attribute) and self.class_of(callee) is not None
                    self._sites[callee].append((call, 1 if is_method else 0))
                if isinstance(call.func, ast.Name) and "__init__" in self.functions:
                    made = [each.value for each in self.bindings(call.func) if isinstance(each.value, ast.ClassDef)]
                    for each in self.functions["__init__"] if made else ():
                        if self.class_of(each) in made:
                            self._sites[each].append((call, 1))
            self._sites_are_known = True
        return self._sites

    def call_sites(self, function: ast.AST) -> list[ast.Call]:
        """Return the calls of a function of this file in this file."""
        return [call for call, _ in self._find_call_sites().get(function, ())]

    def arguments_for(self, function: Function, name: str) -> Iterator[ast.expr]:
        """Yield the values that this file passes for a parameter of `function`, and its default."""
        positional = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        at = positional.index(name) if name in positional else None
        for call, num_bound in self._find_call_sites().get(function, ()):
            yield from (keyword.value for keyword in call.keywords if keyword.arg == name)
            place = -1 if at is None else at - num_bound
            if 0 <= place < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args[: place + 1]):
                yield call.args[place]
        if at is not None:
            yield from self._passed_on(function, at)
            defaults = function.args.defaults
            if (i := at - (len(positional) - len(defaults))) >= 0:
                yield defaults[i]
        for each, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
            if each.arg == name and default is not None:
                yield default

    def _passed_on(self, function: Function, at: int) -> Iterator[ast.expr]:
        for starter, num_before in _STARTERS.items():
            for call in self.calls.get(starter, ()):
                args = argument(call, 1, "args")
                is_this = call.args and any(each is function for each in self.trace(call.args[0]))
                if is_this and isinstance(args, ast.Tuple) and 0 <= at - num_before < len(args.elts):
                    yield args.elts[at - num_before]

    def made_by(self, node: ast.AST) -> list[tuple[str, ast.Call]]:
        """Return the calls that `node` may be the result of, each with the name of what it calls."""
        return [(self.name_of(each), each) for each in self.trace(node) if isinstance(each, ast.Call)]

    def is_made_by(self, node: ast.AST, *names: str) -> bool:
        """Return True if `node` may be the result of a call of one of `names`."""
        return any(name in names for name, _ in self.made_by(node))


def argument(call: ast.Call, at: int, name: str) -> ast.expr | None:
    """Return the argument of `call` at a position or of a name; None if it is not given, or in ``*`` or ``**``."""
    found = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    if found is not None or any(isinstance(each, ast.Starred) for each in call.args[: at + 1]):
        return found
    return call.args[at] if 0 <= at < len(call.args) else None


def has_unknown_arguments(call: ast.Call) -> bool:
    """Return True if arguments of `call` are passed by ``*`` or ``**``."""
    return any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords)


def is_constant(node: ast.AST | None, *values: object) -> bool:
    """Return True if `node` is a literal and one of `values`."""
    return isinstance(node, ast.Constant) and any(
        type(node.value) is type(value) and node.value == value for value in values
    )


def _is_known(module: str, name: str) -> bool:
    return f"{module}.{name}" in _SHORT_NAMES or module == "torch.distributed"
