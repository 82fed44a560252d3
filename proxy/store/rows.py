"""Rows: some blocks of a copy, kept together as one piece of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from proxy.store import Block

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["decode_row", "encode_row", "rows"]

_ROW_BYTES = 256 * 1024
"""A batch longer than this is kept in several rows, so that reads stay short."""

encode_row = msgspec.msgpack.Encoder().encode
decode_row = msgspec.msgpack.Decoder(list[Block]).decode


def rows(blocks: Sequence[Block]) -> Iterator[tuple[Sequence[Block], int]]:
    """Split a batch into rows, each with the bytes of its blocks."""
    row: list[Block] = []
    size = 0
    for block in blocks:
        if row and size + len(block.raw) > _ROW_BYTES:
            yield row, size
            row, size = [], 0
        row.append(block)
        size += len(block.raw)
    if row:
        yield row, size
