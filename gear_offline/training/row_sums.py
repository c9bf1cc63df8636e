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
from gear_offline.kernels.row_products import LOADED, MOST_TENSORS, Job, align, is_supported

LEAST_ROWS = 128  # of a product: with fewer it is none of a batch
# Multiplications of a graph's products: the paper's model has 1.9e9, and eight of it, stacked,
# 1.5e10.  There cuBLAS takes as long on an H200, beyond it less.
MOST_MULTIPLICATIONS = 1 << 34
HOOK = "post_grad_custom_post_pass"  # of inductor

Node = Any  # torch.fx.Node, whose arguments have too many types to be told apart here
aten: Any = torch.ops.aten
convert: Any = torch.ops.prims.convert_element_type.default
PRODUCTS = (aten.mm.default, aten.bmm.default)
VIEWS = (
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.alias.default),
    *(aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.clone.default),
)


def compile_options() -> dict[str, Any]:
    """Return inductor's options for steps of small models."""
    import torch._inductor

    # small kernels that do not depend on each other become one: a third fewer launches a step
    options: dict[str, Any] = {"combo_kernels": True}
    if HOOK not in torch._inductor.list_options():
        return options
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class GroupRowSums(CustomGraphPass):  # type: ignore[misc, unused-ignore]
        """The pass, and what tells its graphs apart in inductor's caches."""

        def __call__(self, graph: Graph) -> None:
            group_row_sums(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__, row_products.__file__))

    return options | {HOOK: GroupRowSums()}


def group_row_sums(graph: Graph) -> None:
    """Put one operator in the place of the gradients of weights, biases and norms.

    A graph of large products stays as it is, and so does one of another device or type.
    """
    nodes = [node for node in graph.nodes if node.target in PRODUCTS]
    products = {node: pair for node in nodes if (pair := _factors(node))}
    if not products:
        return
    nodes = [node for node in graph.nodes if node.target == aten.sum.dim_IntList]
    columns = [node for node in nodes if _is_static(node.args[0]) and node.args[1]]
    scaled = {node: pair for node in columns if (pair := _scaled(node))}
    first = _value(next(iter(products.values()))[1])
    pairs = {
        node: (left, right)
        for node, (left, right) in (products | scaled).items()
        if _value(right).dtype == first.dtype and _value(right).device == first.device
    }
    taken = {tensor for pair in pairs.values() for tensor in pair}
    pairs = {node: pair for node, pair in pairs.items() if _is_last(node, taken)}
    multiplications = sum(
        prod(_value(left).shape) * _value(right).shape[-1]
        for node, (left, right) in pairs.items()
        if node in products
    )
    if len(pairs) < 2 or len(taken) > MOST_TENSORS or multiplications > MOST_MULTIPLICATIONS:
        return
    sums: dict[Node, list[Node]] = {}  # of each tensor's columns
    for node in columns:
        if node not in pairs and _is_last(node, taken):
            sums.setdefault(_root(node.args[0]), []).append(node)
    tensors: list[Node] = []
    jobs: list[Job] = []
    results: list[tuple[Node, int]] = []  # nodes and where their values will be
    size = 0

    def number(tensor: Node) -> int:
        if tensor not in tensors:
            tensors.append(tensor)
        return tensors.index(tensor)

    def reserve(node: Node | None) -> int:
        nonlocal size
        if node is None:
            return -1
        place, size = size, size + align(prod(_value(node).shape))
        results.append((node, place))
        return place

    def sums_of(tensor: Node, groups: int) -> Node | None:
        each = sums.get(tensor, [])
        node = next((node for node in each if _sums_rows(node, groups)), None)
        if node is not None:
            each.remove(node)
        return node

    for node, (left, right) in pairs.items():
        groups = _value(node).shape[0] if node.target == aten.bmm.default else 1
        is_product, is_transposed = node in products, False
        of_right = sums_of(right, groups)
        if of_right is None and is_product and (of_right := sums_of(left, groups)):
            left, right, is_transposed = right, left, True
        operands = number(left), number(right)
        places = reserve(node), reserve(of_right)
        jobs.append(Job(int(is_product), *operands, groups, int(is_transposed), *places))
    _replace(graph, tensors, [field for job in jobs for field in job], size, results)


def _factors(node: Node) -> tuple[Node, Node] | None:
    """Return left and right, (G, R, M) and (G, R, N), of a product over rows, if it is one."""
    left, right = node.args[:2]
    if not (_is_static(left) and _is_static(right) and is_supported(_value(left).device)):
        return None
    value, other = _value(left), _value(right)
    fits = value.dtype in (torch.bfloat16, torch.float16) and value.shape[-1] >= LEAST_ROWS
    if not (fits and value.transpose(-1, -2).is_contiguous() and other.is_contiguous()):
        return None
    if left.target == aten.permute.default and list(left.args[1]) == _swapped(value):
        return _root(left.args[0]), _root(right)
    return left, _root(right)  # stored transposed: see `_replace`


def _scaled(node: Node) -> tuple[Node, Node] | None:
    """Return left, float32, and right, 16 bits, of a sum of their product over all rows."""
    product = node.args[0]
    if product.target != aten.mul.Tensor or not _sums_rows(node, 1):
        return None
    for left, right in (product.args, product.args[::-1]):
        if not (_is_static(left) and _is_static(right)):
            continue
        if not _value(left).shape == _value(right).shape == _value(product).shape:
            continue
        left, right = _root(left), _root(right)
        fits = right.target in (*PRODUCTS, aten.addmm.default)  # else it need not be in memory
        fits = fits and _value(left).is_contiguous() and _value(right).is_contiguous()
        if fits and _value(left).dtype == torch.float32 and _value(left).shape[-1] % LOADED == 0:
            return left, right
    return None


def _replace(
    graph: Graph, tensors: list[Node], jobs: list[int], size: int, results: list[tuple[Node, int]]
) -> None:
    """Add the operator at the end of a graph, and after it what followed its results."""
    output = next(iter(reversed(graph.nodes)))
    followers = set(_followers([node for node, _ in results])) - {output}
    tail = [node for node in graph.nodes if node in followers]
    with graph.inserting_before(output):
        rows = [
            tensor
            if _value(tensor).is_contiguous()
            else _call(graph, aten.permute.default, tensor, _swapped(_value(tensor)))
            for tensor in tensors
        ]
        flat = _call(graph, torch.ops.gear_offline.row_products.default, rows, jobs, size)
        for node, place in results:
            shape = list(_value(node).shape)
            sums = _call(graph, aten.slice.Tensor, flat, 0, place, place + prod(shape))
            _put(graph, node, _call(graph, aten.view.default, sums, shape))
    for node in tail:
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


def _call(graph: Graph, target: Any, *arguments: Any, **options: Any) -> Node:
    """Add a call, with what later passes ask of a node."""
    node = graph.call_function(target, arguments, options)
    values = torch.fx.node.map_arg((arguments, options), _value)
    node.meta["val"] = target(*values[0], **values[1])
    return node


def _value(node: Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _is_static(node: Node) -> bool:
    """Return true for a tensor whose sizes are numbers."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape)


def _root(node: Node) -> Node:
    """Return the tensor that a node shows in another shape, or widened to float32.

    A copy of a part of a tensor is one: the part's rows do not lie one after another.
    """
    while node.target in (*VIEWS, convert) and _is_static(node.args[0]):
        if not _value(node.args[0]).is_contiguous():
            break
        value, source = _value(node), _value(node.args[0])
        is_widened = value.dtype == torch.float32 and source.dtype.itemsize == 2
        if source.shape[-1:] != value.shape[-1:] or not (
            source.dtype == value.dtype or (is_widened and source.is_floating_point())
        ):
            break
        node = node.args[0]
    return node


def _swapped(value: Tensor) -> list[int]:
    """Return the dimensions of a transposed tensor."""
    return [*range(value.ndim - 2), value.ndim - 1, value.ndim - 2]


def _sums_rows(node: Node, groups: int) -> bool:
    """Return true if a sum is over all rows, of each group alone."""
    value = _value(node.args[0])
    if value.ndim < 2:
        return False
    dims = {dim % value.ndim for dim in node.args[1]}
    if groups == 1:
        return dims == set(range(value.ndim - 1))
    return value.shape[0] == groups and dims == set(range(1, value.ndim - 1))


def _is_last(node: Node, taken: set[Node]) -> bool:
    """Return true if only pointwise work and sums follow, and nothing of what is taken."""
    return all(
        other.op == "output" or (_is_light(other) and other not in taken)
        for other in _followers([node])
    )


def _is_light(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or "val" not in node.meta:
        return False
    schema = node.target._schema
    is_plain = schema.name.startswith(("aten::", "prims::")) and not schema.is_mutable
    return is_plain and not schema.name.endswith("mm") and "convolution" not in schema.name


def _followers(nodes: list[Node]) -> Iterator[Node]:
    """Yield all that depends on some nodes."""
    seen, waiting = set[Node](), list(nodes)
    while waiting:
        for user in waiting.pop().users:
            if user not in seen:
                seen.add(user)
                waiting.append(user)
                yield user
