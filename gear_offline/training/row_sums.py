"""A pass over inductor's graph that computes all weight gradients of a step in one launch.

The backward pass of a small model has a dozen products that each end in a weight's gradient, and
twice as many sums of columns that end in those of biases and norms.  Nothing but the optimiser
waits for them.  The pass finds them and puts `gear_offline.kernels.row_products` in their place,
at the end of the graph.

Shape legend: G groups, R rows of each, M and N columns.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from gear_offline.kernels import row_products
from gear_offline.kernels.row_products import ALIGNED, MOST_TENSORS, Job, is_supported

LEAST_ROWS = 128  # of a product: with fewer it is none of a batch
# small kernels that do not depend on each other become one: a third fewer launches a step
COMBINED: dict[str, Any] = {"combo_kernels": True}
HALVES = (torch.bfloat16, torch.float16)

Node = Any  # torch.fx.Node, whose arguments have too many types to be told apart here
aten: Any = torch.ops.aten
convert: Any = torch.ops.prims.convert_element_type.default
PRODUCTS = (aten.mm.default, aten.bmm.default)
VIEWS = (
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.alias.default),
    *(aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.clone.default),
)


def compile_options() -> dict[str, Any]:
    """Return the options with which small models' steps are compiled."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class GroupRowSums(CustomGraphPass):  # type: ignore[misc, unused-ignore]
        """The pass, with what inductor's caches tell it by."""

        def __call__(self, graph: Graph) -> None:
            replaced.append(group_row_sums(graph))

        def uuid(self) -> Any:
            return get_hash_for_files((__file__, row_products.__file__))

    return {**COMBINED, "post_grad_custom_post_pass": GroupRowSums()}


replaced: list[tuple[int, int]] = []


class Result:
    """What a node of the graph is replaced by: a place in the result, and its shape there."""

    def __init__(self, node: Node, place: int) -> None:
        self.node, self.place = node, place


def group_row_sums(graph: Graph, *, everywhere: bool = False) -> tuple[int, int]:
    """Put one operator in the place of weight gradients; return products and sums replaced.

    `everywhere`: also on devices on which it is no faster.
    """
    found = _Finder(graph, everywhere=everywhere)
    if len(found.jobs) > 1:
        _replace(graph, found)
        return found.products, len(found.results) - found.products
    return 0, 0


class _Finder:
    """The products and sums of a graph that can be computed together, at its end."""

    def __init__(self, graph: Graph, *, everywhere: bool) -> None:
        self.everywhere = everywhere
        self.tensors: list[Node] = []
        self.transposed: dict[Node, Node] = {}  # stored so: that node, and what is put in its place
        self.jobs: list[Job] = []
        self.results: list[Result] = []
        self.size = 0
        self.half: torch.dtype | None = None
        products = [node for node in graph.nodes if node.target in PRODUCTS]
        sums = [node for node in graph.nodes if node.target == aten.sum.dim_IntList]
        operands = [(node, *pair) for node in products if (pair := self._operands(node))]
        columns = [(node, *pair) for node in sums if (pair := self._columns(node))]
        plain: dict[Node, list[Node]] = {}
        for node in sums:
            plain.setdefault(_root(node.args[0]), []).append(node)
        inputs = {tensor for _, *pair in (*operands, *columns) for tensor in pair}
        self._inputs = inputs
        for node, left, right in operands:
            if not self._is_last(node):
                continue
            groups = _value(node).shape[0] if node.target == PRODUCTS[1] else 1
            swapped = 0
            sums_node = self._sums_of(plain, right, groups)
            if sums_node is None and (sums_node := self._sums_of(plain, left, groups)):
                left, right, swapped = right, left, 1
            self._add(1, left, right, groups, swapped, node, sums_node)
        self.products = len(self.jobs)
        for node, left, right in columns:
            if self._is_last(node):
                self._add(0, left, right, 1, 0, node, self._sums_of(plain, right, 1))

    def _operands(self, node: Node) -> tuple[Node, Node] | None:
        """Return left and right, (G, R, M) and (G, R, N), of a product over rows, if it is one."""
        left, right = node.args[:2]
        value, other = _value(left), _value(right)
        rows = value.shape[-1]
        fits = value.dtype in HALVES and (self.everywhere or is_supported(value.device))
        if (
            not fits
            or rows < LEAST_ROWS
            or not _is_row_major(value.transpose(-1, -2))
            or not _is_row_major(other)
        ):
            return None
        self.half = self.half or value.dtype
        if self.half != value.dtype:
            return None
        order = [*range(value.ndim - 2), value.ndim - 1, value.ndim - 2]
        if left.target == aten.permute.default and list(left.args[1]) == order:
            return _root(left.args[0]), _root(right)
        return left, _root(right)  # stored transposed: see `_tensor`

    def _columns(self, node: Node) -> tuple[Node, Node] | None:
        """Return left, float32, and right, 16 bits, of a sum of their product over all rows."""
        product = node.args[0]
        if product.target != aten.mul.Tensor or not _sums_rows(node, 1):
            return None
        for left, right in (product.args, product.args[::-1]):
            if not (isinstance(left, torch.fx.Node) and isinstance(right, torch.fx.Node)):
                continue
            if not _value(left).shape == _value(right).shape == _value(product).shape:
                continue
            left, right = _root(left), _root(right)
            fits = right.target in (*PRODUCTS, aten.addmm.default)
            fits = fits and _value(left).dtype == torch.float32 and _value(right).dtype in HALVES
            if fits and (self.everywhere or is_supported(_value(right).device)):
                return left, right
        return None

    def _sums_of(self, plain: dict[Node, list[Node]], tensor: Node, groups: int) -> Node | None:
        """Take the sums over the rows of a tensor, if the graph has them."""
        for node in plain.get(tensor, ()):
            if _sums_rows(node, groups) and self._is_last(node):
                plain[tensor].remove(node)
                return node
        return None

    def _is_last(self, node: Node) -> bool:
        """Return true if nothing but pointwise work and sums follows, and nothing that we take."""
        return all(
            other.op == "output" or (_is_light(other) and other not in self._inputs)
            for other in _followers([node])
        )

    def _add(
        self,
        is_product: int,
        left: Node,
        right: Node,
        groups: int,
        swapped: int,
        node: Node,
        sums: Node | None,
    ) -> None:
        if len(self.tensors) + 4 > MOST_TENSORS:
            return
        job = (is_product, self._number(left), self._number(right), groups, swapped)
        self.jobs.append(Job(*job, self._reserve(node), self._reserve(sums)))

    def _number(self, tensor: Node) -> int:
        if tensor not in self.tensors:
            self.tensors.append(tensor)
        return self.tensors.index(tensor)

    def _reserve(self, node: Node | None) -> int:
        if node is None:
            return -1
        place, elements = self.size, prod(_value(node).shape)
        self.size += -(-elements // ALIGNED) * ALIGNED
        self.results.append(Result(node, place))
        return place


def _replace(graph: Graph, found: _Finder) -> None:
    output = next(iter(reversed(graph.nodes)))
    replaced = [result.node for result in found.results]
    tail = [node for node in _followers(replaced) if node.op != "output"]
    with graph.inserting_before(output):
        tensors = [_in_rows(graph, tensor) for tensor in found.tensors]
        numbers = [number for job in found.jobs for number in job]
        operator_ = torch.ops.gear_offline.row_products.default
        flat = _call(graph, operator_, tensors, numbers, found.size)
        for result in found.results:
            shape = list(_value(result.node).shape)
            end = result.place + prod(shape)
            part = _call(graph, aten.slice.Tensor, flat, 0, result.place, end)
            _put(graph, result.node, _call(graph, aten.view.default, part, shape))
    in_order = {node: number for number, node in enumerate(graph.nodes)}
    for node in sorted(tail, key=in_order.__getitem__):
        output.prepend(node)
    graph.eliminate_dead_code()
    graph.lint()


def _put(graph: Graph, node: Node, new: Node) -> None:
    """Replace a node by one of float32: where it becomes that anyway it is not rounded before."""
    narrow: Node | None = new if _value(node).dtype == torch.float32 else None
    for user in list(node.users):
        if user.target == convert and user.args[1] == torch.float32:
            user.replace_all_uses_with(new)
        elif user.target in VIEWS and user.args[0] is node:
            _put(graph, user, _call(graph, user.target, new, *user.args[1:], **user.kwargs))
        else:
            narrow = narrow or _call(graph, convert, new, _value(node).dtype)
            user.replace_input_with(node, narrow)


def _in_rows(graph: Graph, tensor: Node) -> Node:
    """Return a tensor whose rows lie one after another, of one that is stored transposed."""
    value = _value(tensor)
    if _is_row_major(value):
        return tensor
    order = [*range(value.ndim - 2), value.ndim - 1, value.ndim - 2]
    return _call(graph, aten.permute.default, tensor, order)


def _call(graph: Graph, target: Any, *arguments: Any, **options: Any) -> Node:
    """Add a call, with what later passes ask of a node."""
    node = graph.call_function(target, arguments, options)
    values = torch.fx.node.map_arg((arguments, options), _value)
    node.meta["val"] = target(*values[0], **values[1])
    return node


def _value(node: Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _root(node: Node) -> Node:
    """Return the tensor that a node shows in another shape, or widened to float32."""
    while node.op == "call_function":
        source = node.args[0]
        same = isinstance(source, torch.fx.Node) and isinstance(source.meta.get("val"), Tensor)
        if not same or _value(source).shape[-1:] != _value(node).shape[-1:]:
            break
        widened = _value(node).dtype == torch.float32 and _value(source).dtype in HALVES
        if node.target not in VIEWS and not (node.target == convert and widened):
            break
        node = source
    return node


def _is_row_major(value: Tensor) -> bool:
    """Return true if rows lie one after another; strides of dimensions of size 1 mean nothing."""
    expected = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _sums_rows(node: Node, groups: int) -> bool:
    """Return true if a sum is over all rows, of each group alone."""
    source: Any = node.args[0]
    value, dims = _value(source), {dim % _value(source).ndim for dim in node.args[1]}
    if groups == 1:
        return dims == set(range(value.ndim - 1))
    return value.shape[0] == groups and dims == set(range(1, value.ndim - 1))


def _is_light(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    name = str(node.target)
    light = name.startswith(("aten.", "prims.")) and not name.split(".")[1].endswith("mm")
    return light and "conv" not in name.replace("convert", "")


def _followers(nodes: list[Node]) -> Iterator[Node]:
    """Yield all that depends on some nodes."""
    seen, waiting = set[Node](), list(nodes)
    while waiting:
        for user in waiting.pop().users:
            if user not in seen:
                seen.add(user)
                waiting.append(user)
                yield user
