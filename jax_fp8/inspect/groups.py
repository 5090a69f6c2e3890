"""The groups of devices that exchange data in a collective, read from HLO's text, and how they lie on hosts.

    replica_groups=[2,4]<=[8]                      (0, 1, 2, 3), (4, 5, 6, 7)
    replica_groups=mesh['a'=2,'b'=4] {'a'}         (0, 4), (1, 5), (2, 6), (3, 7)
    source_target_pairs={{0,1},{1,0},{2,3}}        (0, 1), (2, 3): devices that pairs connect

Devices are numbered in the order of the mesh. Every host has the same number of them, in this order.
"""

import functools
import itertools
import math
import re
from collections import Counter

import numpy as np

Groups = tuple[tuple[int, ...], ...]

# HLO writes groups in three ways: listed, {{0,1},{2,3}} or {}; as a reshaped and transposed iota of (groups, devices),
# [2,2]<=[4]T(1,0); or by axes of a mesh, or parts of axes, mesh['a'=2,'b'=4] {'b':(1)2,'a'}.
_LISTED = re.compile(r"\breplica_groups=\{((?:\{[\d,]*\},?)*)\}")
_ORDER = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_IOTA = re.compile(rf"\breplica_groups=\[([\d,]+)\]<={_ORDER}")
_MESH = re.compile(r"\breplica_groups=mesh\[([^\]]*)\](?:, device_ids=\((?P<ids>.*?)\)(?= \{))? \{([^}]*)\}")
_MESH_AXIS = re.compile(r"'?([^',=]+)'?=(\d+)")
_GROUP_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,|$)")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def groups_of(attributes: str, devices: int) -> Groups:
    """The groups of a collective: every device exchanges data with the others of its group.

    Args:
      attributes: the text of the instruction behind its operands.
      devices: how many the program runs on.
    """
    if iota := _IOTA.search(attributes):
        return _rows(_in_order(*iota.groups()[1:]).reshape(-1, _numbers(iota[1])[-1]))
    if mesh := _MESH.search(attributes):
        return _rows(_groups_of_mesh(mesh[1], mesh["ids"], mesh[3]))
    if pairs := _PAIRS.search(attributes):
        return _connected([_numbers(pair) for pair in re.findall(r"\d+,\d+", pairs[1])])
    listed = _LISTED.search(attributes)
    groups = [_numbers(group) for group in re.findall(r"[\d,]+(?=\})", listed[1])] if listed else []
    return tuple(groups) or (tuple(range(devices)),)  # {} is all devices


@functools.cache
def on_hosts(groups: Groups, per_host: int) -> tuple[int, int]:
    """How many hosts the widest group spans, and the smallest number of devices that it has on one of them."""
    hosts = [Counter(device // per_host for device in group) for group in groups]
    widest, fewest = max(((len(host), -min(host.values())) for host in hosts), default=(1, -1))
    return widest, -fewest


def _groups_of_mesh(sizes: str, ids: str | None, names: str) -> np.ndarray:
    """A row of devices for each group: devices that differ only in the named axes, or named parts of axes. An axis with
    named parts is cut into several dims; then the named dims are moved to the end.
    """
    axes = {name: int(size) for name, size in _MESH_AXIS.findall(sizes)}
    parts: dict[str, list[tuple[int, int]]] = {name: [] for name in axes}
    for name, before, size in _GROUP_AXIS.findall(names):
        parts[name].append((int(before or 1), int(size or axes[name])))
    dims: list[tuple[int, bool]] = []  # of the mesh with axes cut into parts: the size, and whether it is named
    for name, size in axes.items():
        done = 1
        for before, part in sorted(parts[name]):
            dims += [(before // done, False), (part, True)]
            done = before * part
        dims.append((size // done, False))
    if ids is None:
        devices = np.arange(math.prod(axes.values()))
    elif order := re.fullmatch(_ORDER, ids):
        devices = _in_order(*order.groups())
    else:
        devices = np.array(_numbers(ids))
    order = sorted(range(len(dims)), key=lambda dim: dims[dim][1])
    together = math.prod(size for size, is_named in dims if is_named)
    return devices.reshape([size for size, _ in dims]).transpose(order).reshape(-1, together)


def _in_order(shape: str, order: str | None) -> np.ndarray:
    """Devices in the order of `[2,4]T(1,0)`: numbered in this shape, which is then transposed."""
    sizes = _numbers(shape)
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(_numbers(order) if order else None).reshape(-1)


def _connected(pairs: list[tuple[int, ...]]) -> Groups:
    """Devices that pairs of source and target connect: (0, 1) and (2, 3) of {0,1},{1,0},{2,3}."""
    group_of = {device: {device} for device in itertools.chain(*pairs)}
    for source, target in pairs:
        both = group_of[source] | group_of[target]
        group_of |= dict.fromkeys(both, both)
    return tuple(dict.fromkeys(tuple(sorted(devices)) for _, devices in sorted(group_of.items())))


def _rows(devices: np.ndarray) -> Groups:
    return tuple(map(tuple, devices.tolist()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
