"""The distribution trees: from which parents each host gets versions. A pure function of the list of hosts.

There are two kinds of tree. The *control* tree is wide and shallow: versions are announced down it, small changes
travel with the announcement, acknowledgements come back up. The *stripe* trees carry large versions: each piece belongs
to one stripe by its digest, and a host that has children in one stripe is a leaf in the others. So every host sends
about as many bytes as it receives, whatever the fan-out, and the gateway sends each piece once for each of its own
children.

A host requests pieces from its parent. If the parent dies, stalls or is too slow, it turns to the next on its route:
its parent's siblings (in a different order for each child, so that the orphans of one host spread out), then its
grandparent, and so on up to the gateway. All of them are nearer to the gateway in that tree, so no two hosts ever wait
for each other. When a host joins late, no other host's routes change.

Neighbours in the list are neighbours in the trees: hosts are sorted by zone and node, the hosts with children in one
subtree are consecutive, and the others have a parent on their own node, or else in their zone, if one has room.

Imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GATEWAY = ""
"""The name of the root of every tree."""

CONTROL_FANOUT = 8
STRIPES = 4


@dataclass(frozen=True, slots=True)
class HostSlot:
    """A host as the planner sees it; zone and node are empty if they are not known."""

    name: str
    zone: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class Routes:
    """The parents of one host, best first; the gateway is always the last. ``control``: for announcements.
    ``stripes[i]``: for the pieces of stripe i."""

    control: tuple[str, ...]
    stripes: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The trees, child to parent, and the routes that follow from them."""

    control: dict[str, str]
    stripes: tuple[dict[str, str], ...]
    routes: dict[str, Routes]


def plan(hosts: Sequence[HostSlot], *, fanout: int = CONTROL_FANOUT, stripes: int = STRIPES) -> Plan:
    """Names must be unique and not GATEWAY."""
    ordered = sorted(hosts, key=lambda host: (host.zone, host.node))
    control = _tree(ordered, fanout=fanout, roots=fanout, heads=_heads(ordered, fanout, fanout))
    striped = tuple(
        _tree(ordered, fanout=stripes, roots=1, heads=_heads(ordered, stripes, 1, stripe)) for stripe in range(stripes)
    )
    control_routes = _routes(control, ordered)
    stripe_routes = [_routes(tree, ordered) for tree in striped]
    routes = {
        host.name: Routes(control_routes[host.name], tuple(of[host.name] for of in stripe_routes)) for host in ordered
    }
    return Plan(control, striped, routes)


def _heads(hosts: list[HostSlot], fanout: int, roots: int, turn: int = 0) -> list[int]:
    """The positions that have children: as few as suffice, evenly spread, different for each ``turn``."""
    count = max(0, -((roots - len(hosts)) // fanout))
    step = max(1, len(hosts) // max(count, 1))
    chosen = [position for position in range(len(hosts)) if position % step == turn % step][:count]
    taken = set(chosen)
    spare = [position for position in range(len(hosts)) if position not in taken]
    return sorted(chosen + spare[: count - len(chosen)])


def _tree(hosts: list[HostSlot], *, fanout: int, roots: int, heads: list[int]) -> dict[str, str]:
    """Child to parent: a complete tree of ``heads``, and the other hosts below the heads nearest to them."""
    parents: dict[str, str] = {}
    room = {GATEWAY: roots, **{hosts[head].name: fanout for head in heads}}
    pending = [(GATEWAY, segment) for segment in _split(heads, roots, fanout)]
    while pending:
        parent, segment = pending.pop()
        name = hosts[segment[0]].name
        parents[name] = parent
        room[parent] -= 1
        pending += [(name, part) for part in _split(segment[1:], fanout, fanout)]
    left = [host for host in hosts if host.name not in parents]
    by_name = {host.name: host for host in hosts}
    for kind in ("node", "zone"):
        left = _place_near(left, kind, room, by_name, parents)
    places = (parent for parent, free in room.items() for _ in range(free))
    for host in left:
        parents[host.name] = next(places)
    return parents


def _place_near(
    left: list[HostSlot], kind: str, room: dict[str, int], by_name: dict[str, HostSlot], parents: dict[str, str]
) -> list[HostSlot]:
    """Puts hosts below heads of their own node, or zone, that have room; returns the others."""
    near: dict[tuple[str, str], list[str]] = {}
    for name, free in room.items():
        if name != GATEWAY and free:
            near.setdefault(_neighbourhood(by_name[name], kind), []).append(name)
    others = []
    for host in left:
        heads = near.get(_neighbourhood(host, kind), [])
        while heads and not room[heads[0]]:
            heads.pop(0)
        if heads and _neighbourhood(host, kind) != ("", ""):
            parents[host.name] = heads[0]
            room[heads[0]] -= 1
        else:
            others.append(host)
    return others


def _neighbourhood(host: HostSlot, kind: str) -> tuple[str, str]:
    """What a host shares with its neighbours; empty if it is not known."""
    if kind == "zone":
        return host.zone, ""
    return (host.zone, host.node) if host.node else ("", "")


def _split(positions: Sequence[int], parts: int, fanout: int) -> list[Sequence[int]]:
    """Splits ``positions`` into at most ``parts`` runs, one for each subtree, such that in each all hosts with children
    except one have ``fanout`` of them: the fewest hosts have children, and the depth is minimal."""
    height, full = 0, 1
    while parts * (full * fanout + 1) <= len(positions):
        full = full * fanout + 1
        height += 1
    if len(positions) < parts:
        return [positions[index : index + 1] for index in range(len(positions))]
    spare = len(positions) - parts * full
    runs = []
    start = 0
    for _ in range(parts):
        more = min(spare, fanout ** (height + 1))
        spare -= more
        runs.append(positions[start : start + full + more])
        start += full + more
    return runs


def _routes(parents: dict[str, str], hosts: list[HostSlot]) -> dict[str, tuple[str, ...]]:
    children: dict[str, list[str]] = {}
    for host in hosts:
        children.setdefault(parents[host.name], []).append(host.name)
    routes = {}
    for host in hosts:
        parent = parents[host.name]
        route = [parent]
        turn = children[parent].index(host.name)
        while parent != GATEWAY:
            grandparent = parents[parent]
            uncles = [uncle for uncle in children[grandparent] if uncle not in route]
            route += _rotated(uncles, turn)
            route.append(grandparent)
            parent = grandparent
        routes[host.name] = tuple(route)
    return routes


_MAX_UNCLES = 3


def _rotated(uncles: list[str], turn: int) -> list[str]:
    """A few of ``uncles``, starting with a different one for each ``turn``."""
    first = turn % max(len(uncles), 1)
    return (uncles[first:] + uncles[:first])[:_MAX_UNCLES]
