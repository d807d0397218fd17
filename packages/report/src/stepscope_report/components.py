"""Strongly connected components of a graph, by Tarjan's algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet


def components(edges: Sequence[AbstractSet[int]]) -> list[list[int]]:
    """Return the groups of nodes that reach each other. A node alone is a group.

    Args:
        edges: The nodes that each node leads to.
    """
    found: list[list[int]] = []
    order: dict[int, int] = {}
    lowest: dict[int, int] = {}
    path: list[int] = []
    on_path = set[int]()
    for start in range(len(edges)):
        rest: list[tuple[int, Iterator[int]]] = [] if start in order else [(start, iter(edges[start]))]
        while rest:
            node, targets = rest[-1]
            if node not in order:
                order[node] = lowest[node] = len(order)
                path.append(node)
                on_path.add(node)
            for target in targets:
                if target not in order:
                    rest.append((target, iter(edges[target])))
                    break
                if target in on_path:
                    lowest[node] = min(lowest[node], order[target])
            else:
                rest.pop()
                if rest:
                    lowest[rest[-1][0]] = min(lowest[rest[-1][0]], lowest[node])
                if lowest[node] == order[node]:
                    at = path.index(node)
                    found.append(path[at:])
                    on_path.difference_update(path[at:])
                    del path[at:]
    return found
