"""Checks of what is said of nodes of ``layered_transformer``, against what is known without graphcap.

Four witnesses, each of its own origin: the text of the model (lines), the parameters that a launch reads (addresses
in its arguments), the words in a kernel's name, and, for eager work, captures of one piece alone.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from helpers import layered_transformer
from helpers.layered_transformer import (
    NUM_LAYERS,
    PART_OF_LINE,
    TEXT,
    Block,
    Scope,
    Transformer,
    batch,
    layers_of,
    layers_of_modules,
    lines,
    owner,
)
from torch import Tensor, nn

if TYPE_CHECKING:  # programs that import nothing of graphcap use this module
    from graphcap_backend.capture.nodes import Node

WORK = ("kernel", "memcpy", "memset")

_WORDS = {"gelu": "gelu(", "layer_norm": "norm", "scaled_dot": "scaled_dot", "fmha": "scaled_dot"}
"""What is in a kernel's name, and then in the text of one of its lines."""


def work(nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if node.kind in WORK]


def scopes_of(node: Node) -> set[Scope]:
    """The (layer, part) pairs that a node's annotation names."""
    annotation = node.annotation or {}
    scopes = annotation.get("fused") or ([annotation] if annotation else [])
    return {(scope["layer"], scope["name"]) for scope in scopes}


def check_lines(nodes: Sequence[Node]) -> None:
    """Every node names lines of the model that can have made it, and calls of the layers that its modules are in."""
    for node in work(nodes):
        text = [TEXT[line] for line in lines(node.sources)]
        assert 0 < len(text) == len(node.sources), node
        assert set(node.sources) <= set((node.stack or "").splitlines()), node
        for word, expected in _WORDS.items():
            assert word not in node.name.lower() or any(expected in line for line in text), (node, text)
        assert layers_of(node.stack.splitlines()) == layers_of_modules(node.modules), node
    seen = {layer for node in work(nodes) for layer in layers_of((node.stack or "").splitlines())}
    assert seen == set(range(NUM_LAYERS)), seen


def check_call_sites(nodes: Sequence[Node]) -> None:
    """A fused kernel that many layers call is one name with a call path for each."""
    paths = defaultdict(list)
    for node in work(nodes):
        if "fused" in node.name:
            paths[node.name].append(node.stack)
    many = {name: stacks for name, stacks in paths.items() if len(stacks) >= NUM_LAYERS - 2}
    assert many, {name: len(stacks) for name, stacks in paths.items()}
    for name, stacks in many.items():
        layers = {tuple(sorted(layers_of((stack or "").splitlines()))) for stack in stacks}
        assert len(layers) >= NUM_LAYERS - 2, (name, layers)
        most = Counter(stacks).most_common(1)[0]
        assert most[1] <= len(stacks) // (NUM_LAYERS - 2), (name, most)


def check_scopes(nodes: Sequence[Node], *, backward: bool) -> None:
    """Scopes are those of the lines and modules that a node was made from, and say "backward" where it is."""
    for node in work(nodes):
        scopes = scopes_of(node)
        assert {layer for layer, _ in scopes} == layers_of_modules(node.modules), node
        assert {part for _, part in scopes} == {PART_OF_LINE[at] for at in lines(node.sources) if at in PART_OF_LINE}, (
            node
        )
        assert {scope for path in node.modules if (scope := owner(path))} <= scopes, node
        phase = (node.annotation or {}).get("autograd_phase")
        assert phase == ("backward" if backward and scopes else None), node
    named = set[Scope]().union(*(scopes_of(node) for node in work(nodes)))
    assert named == {(layer, part) for layer in range(NUM_LAYERS) for part in ("attention", "mlp")}, named


# Values -------------------------------------------------------------------------------------------------------


def check_served(model: nn.Module, compiled: Callable[[Tensor], Tensor], device: str) -> None:
    """Calls 1 to 5 with changing inputs equal eager, and still do once the last has run."""
    with torch.no_grad():
        results = [compiled(batch(device, number)) for number in range(5)]
        for number, result in enumerate(results):
            torch.testing.assert_close(result, model(batch(device, number)), rtol=1e-4, atol=1e-4)


def check_trained(model: nn.Module, compiled: Callable[[Tensor], Tensor], device: str) -> None:
    """Gradients of five steps with changing inputs and weights equal eager's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = dict(model.named_parameters())
    for number in range(5):
        grads = []
        for function in (model, compiled):
            optimizer.zero_grad()
            # (A norm's output has a constant square: against zero all gradients would be zero.)
            (function(batch(device, number)) - batch(device, 100 + number)).square().mean().backward()
            grads.append({name: parameter.grad for name, parameter in parameters.items()})
        for name, expected in grads[0].items():
            largest = expected.abs().max().item()
            assert largest > 1e-6, name
            torch.testing.assert_close(grads[1][name], expected, rtol=1e-3, atol=1e-3 * largest)
        optimizer.step()


# Parameters that a launch reads -------------------------------------------------------------------------------


def check_parameters(nodes: Sequence[Node], read: Sequence[set[str]]) -> None:
    """A node that reads a layer's weight is in that layer's scope.

    Args:
        read: names of the parameters in each node's arguments.
    """
    readers: Counter[int] = Counter()
    for node, names in zip(nodes, read, strict=True):
        owners = {scope for name in names if (scope := owner(name))}
        assert owners <= scopes_of(node), (node, names)
        readers.update({layer for layer, _ in owners})
    assert all(readers[layer] >= 4 for layer in range(NUM_LAYERS)), readers


def check_order(nodes: Sequence[Node], read: Sequence[set[str]], *, backward: bool) -> None:
    """A layer's GELU runs after one of its products and before the other: what does is in that layer's scope."""
    for layer in range(NUM_LAYERS):
        up, down = (
            next(at for at, names in enumerate(read) if f"blocks.{layer}.{name}.weight" in names)
            for name in ("up", "down")
        )
        start, end = (down, up) if backward else (up, down)
        between = [scopes_of(node) for node in nodes[start:end] if "gelu" in node.name]
        assert {(layer, "mlp")} in between, (layer, start, end, between)
        if not backward:
            assert all({(layer, "mlp")} == scopes for scopes in between), (layer, between)


class _Addresses:
    """Where each parameter lies."""

    def __init__(self, model: nn.Module) -> None:
        self._ranges = [
            (value.data_ptr(), value.data_ptr() + value.nbytes, name) for name, value in model.named_parameters()
        ]

    def names(self, addresses: Sequence[int]) -> set[str]:
        return {
            name for address in addresses for start, end, name in self._ranges if address and start <= address < end
        }


def parameters_in_host_graph(model: nn.Module, graph: Any) -> list[set[str]]:
    """Names of the parameters among the arguments of each launch of a ``HostGraph``."""
    from torch.utils._pytree import tree_leaves

    known = _Addresses(model)
    return [
        known.names([leaf.data_ptr() for leaf in tree_leaves((launch.args, dict(launch.kwargs))) if _is_tensor(leaf)])
        for launch in graph._launches
    ]


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def parameters_in_cuda_graph(model: nn.Module, graph: Any) -> list[set[str]]:
    """Names of the parameters whose addresses are in the arguments of each kernel of a ``CUDAGraph``."""
    from cuda.bindings import driver

    def ok(answer: Any) -> Any:
        assert int(answer[0]) == 0, answer
        return answer[1:]

    known = _Addresses(model)
    raw = driver.CUgraph(graph.raw_cuda_graph())
    _, number = ok(driver.cuGraphGetNodes(raw, 0))
    handles, number = ok(driver.cuGraphGetNodes(raw, number))
    found = []
    for handle in handles[:number]:
        (kind,) = ok(driver.cuGraphNodeGetType(handle))
        is_kernel = kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        found.append(known.names(_argument_words(driver, handle)) if is_kernel else set())
    return found


def _argument_words(driver: Any, handle: Any) -> list[int]:
    """All aligned words of 8 bytes in the arguments of a kernel node, those inside structures too."""
    result, params = driver.cuGraphKernelNodeGetParams(handle)
    assert int(result) == 0, result
    pointers = int(params.kernelParams)
    words: list[int] = []
    for index, size in enumerate(_argument_sizes(driver, params) if pointers else ()):
        address = ctypes.c_void_p.from_address(pointers + 8 * index).value
        assert address is not None
        words += [word for (word,) in struct.iter_unpack("<Q", ctypes.string_at(address, size - size % 8))]
    return words


def _argument_sizes(driver: Any, params: Any) -> Iterator[int]:
    for index in itertools.count():
        if int(params.func):
            result, _, size = driver.cuFuncGetParamInfo(params.func, index)
        else:
            result, _, size = driver.cuKernelGetParamInfo(params.kern, index)
        if int(result):  # past the last one
            return
        yield int(size)


# Pieces captured alone ----------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A stretch of the training step whose scope is known because nothing else is in it."""

    scope: Scope | None
    run: Callable[[Tensor], Tensor]
    parameters: list[Tensor]


Labelled = tuple[str, dict[str, Any] | None]
"""A node's name and annotation."""


def train_step(model: Transformer, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Forward, backward and an update, with gradients put in place and not accumulated."""
    parameters = list(model.parameters())
    loss = model(x).square().mean()
    for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = grad
    with layered_transformer.mark("optimizer"):
        optimizer.step()


def _pieces(model: Transformer) -> Iterator[Piece]:
    yield Piece(None, lambda x: x + model.position, [model.position])
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        attention, mlp = (block.norm1, block.attention), (block.norm2, block.up, block.down)
        yield Piece((number, "attention"), block.attend, [p for module in attention for p in module.parameters()])
        yield Piece((number, "mlp"), block.think, [block.scales, *(p for module in mlp for p in module.parameters())])
    yield Piece(None, lambda x: model.norm(x).square().mean(), list(model.norm.parameters()))


def train_step_by_pieces(
    model: Transformer, optimizer: torch.optim.Optimizer, x: Tensor, names: Callable[[Callable[[], object]], list[str]]
) -> list[Labelled]:
    """What ``train_step`` must launch, in order.

    Args:
        names: captures what it is given, recording no scopes; names of the nodes.
    """
    forward: list[Labelled] = []
    backward: list[Labelled] = []
    for piece in _pieces(model):
        x = x.detach().requires_grad_(bool(forward))
        # Without a graph: the nodes it would keep alive belong to this stream, not to the capture's.
        with torch.no_grad():
            following = piece.run(x)
        inputs = [x, *piece.parameters] if x.requires_grad else piece.parameters
        grad = torch.ones_like(following) if following.dim() else None
        alone = names(lambda piece=piece, x=x: piece.run(x))  # type: ignore[misc]
        both = names(
            lambda piece=piece, x=x, inputs=inputs, grad=grad: torch.autograd.grad(piece.run(x), inputs, grad)  # type: ignore[misc]
        )
        assert both[: len(alone)] == alone
        forward += [(name, _annotation(piece.scope)) for name in alone]
        backward[:0] = [(name, _annotation(piece.scope, autograd_phase="backward")) for name in both[len(alone) :]]
        x = following
    return forward + backward + [(name, {"name": "optimizer"}) for name in names(optimizer.step)]


def _annotation(scope: Scope | None, **more: str) -> dict[str, Any] | None:
    return None if scope is None else {"layer": scope[0], "name": scope[1], **more}


def check_pieces(nodes: Sequence[Node], expected: Sequence[Labelled]) -> None:
    """Name and scope of every node are those of the pieces, and lines lie in the piece."""
    found = [(node.name, None if node.annotation is None else dict(node.annotation)) for node in nodes]
    assert found == list(expected), [pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]][:3]
    for node in nodes:
        text = [TEXT[line] for line in lines(node.sources)]
        for word, wanted in _WORDS.items():
            assert word not in node.name.lower() or any(wanted in line for line in text), (node, text)
        for layer, part in scopes_of(node) if node.annotation and "layer" in node.annotation else ():
            assert [PART_OF_LINE[line] for line in lines(node.sources)] == [part], node
            assert layers_of((node.stack or "").splitlines()) == {layer}, node
        assert node.sources, node


def check_accumulation(step: Sequence[Node], accumulated: Sequence[Node], num_parameters: int) -> None:
    """Adding to gradients that are there is one node a parameter, without a scope; all else has the step's.

    Args:
        step: nodes of ``train_step``.
        accumulated: nodes of its forward and a ``backward()``.
    """
    before, after = (Counter((node.name, str(node.annotation)) for node in nodes) for nodes in (step, accumulated))
    added, gone = after - before, before - after
    assert added.total() == num_parameters, added
    assert {annotation for _, annotation in added} == {"None"}, added
    assert {annotation for _, annotation in gone} == {str({"name": "optimizer"})}, gone


def keep_inputs(model: Transformer, x: Tensor) -> None:
    """Have each layer fill and copy as well."""
    for block in model.blocks:
        assert isinstance(block, Block)
        block.kept = torch.empty_like(x)


def check_copies_and_fills(nodes: Sequence[Node]) -> None:
    """Each layer has both, forward and backward."""
    found = {
        (node.annotation["layer"], node.annotation.get("autograd_phase"), str(node.kind))
        for node in nodes
        if node.annotation and "layer" in node.annotation
    }
    # On a GPU the backward fills by a kernel.
    both = ((None, "memcpy"), (None, "memset"), ("backward", "memcpy"))
    wanted = {(layer, *one) for layer in range(NUM_LAYERS) for one in both}
    assert wanted <= found, wanted - found
