from __future__ import annotations

import pytest
from pydantic import ValidationError

from meshgate_wire.models.fields import Region


def test_a_region_has_a_size_and_a_stride_for_each_label() -> None:
    with pytest.raises(ValidationError, match="as many sizes and strides as labels"):
        Region(labels=("hosts",), offset=0, sizes=(1, 2), strides=(1,))
    assert Region(labels=(), offset=0, sizes=(), strides=()).labels == ()
