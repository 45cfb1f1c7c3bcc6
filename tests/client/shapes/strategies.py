"""Random shapes and operations on meshes."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from meshgate.shapes.ndslice import Slice
from meshgate.shapes.shape import Extent, Shape
from tests.client.beside_monarch import outcome

LABELS = ("hosts", "gpus", "dp", "tp", "a b", "it's", 'q"\\')
sizes = st.lists(st.integers(0, 4), max_size=4)
labels = st.sampled_from(LABELS)
texts = st.text(st.characters(max_codepoint=0x2FF), max_size=4)  # printability of others depends on the Unicode version
numbers = st.integers(-2, 70)
python_slices = st.builds(slice, *[st.none() | st.integers(-6, 6)] * 2, st.none() | st.integers(1, 4))


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Offsets, sizes and strides, most of which nest."""
    dims = draw(sizes)
    if draw(st.booleans()):
        strides = draw(st.lists(st.integers(0, 12), max_size=4))
        return {"offset": draw(st.integers(0, 5)), "sizes": dims, "strides": strides}
    order = draw(st.permutations(range(len(dims))))
    strides, step = [1] * len(dims), 1
    for dim in order:
        step *= draw(st.integers(1, 3))
        strides[dim] = step
        step *= max(dims[dim], 1)
    return {"offset": draw(st.integers(0, 5)), "sizes": dims, "strides": strides}


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Valid shapes with distinct labels."""
    layout = draw(layouts().filter(lambda layout: not isinstance(outcome(lambda: Slice(**layout)), Exception)))
    dims = len(layout["sizes"])
    names = draw(st.lists(labels, min_size=dims, max_size=dims, unique=True))
    return Shape(names, Slice(**layout))


NAMES = ("hosts", "gpus", "dp", "tp", "pp")
names = st.sampled_from(NAMES)
parts = st.builds(slice, *[st.none() | st.integers(-4, 4)] * 2, st.none() | st.integers(1, 3))
coordinates = st.dictionaries(names, st.integers(-1, 4), max_size=4)


@st.composite
def dense_shapes(draw: st.DrawFn) -> Shape:
    """The shapes of newly created meshes."""
    labels = draw(st.lists(names, max_size=3, unique=True))
    sizes = [draw(st.sampled_from([0, 1, 2, 3, 4, 6])) for _ in labels]
    return Extent(labels, sizes).region.as_shape()


slicings = st.tuples(st.just("slice"), st.dictionaries(names, st.integers(-1, 4) | parts, max_size=2))
splits = st.tuples(
    st.just("split"),
    st.dictionaries(names, st.lists(names, max_size=2, unique=True).map(tuple) | st.integers(-1, 4), max_size=3),
)
renames = st.tuples(st.just("rename"), st.dictionaries(names, names, max_size=2))
flattenings = st.tuples(st.just("flatten"), st.fixed_dictionaries({"name": names}))
operations = slicings | splits | renames | flattenings
