"""Rows out of an SQLite file whose trees may be broken: each page is read for itself.

Knows the file format: leaf pages, cells, records, overflow chains. Follows no tree, so that a
damaged page costs its own rows alone. Knows no table of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from mmap import mmap

Column = int | float | str | bytes | None
PAGE_BYTES = 4096
"""Of every `chat.db`; believed when the header of the file says nonsense."""

_TABLE_LEAF, _INDEX_LEAF, _INDEX_INNER, _TABLE_INNER = 0x0D, 0x0A, 0x02, 0x05
_INT_BYTES = (0, 1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class Row:
    """One record as it stands in the file; bytes of a text that are no UTF-8 as lone surrogates."""

    rowid: int | None
    """None in a table WITHOUT ROWID."""
    columns: tuple[Column, ...]


@dataclass(slots=True)
class PageReader:
    """The rows of all pages that can be read.

    Args:
        data: The file.
        page_bytes: Size of its pages.
    """

    data: bytes | mmap
    page_bytes: int = PAGE_BYTES
    unreadable: set[int] = field(default_factory=set[int])
    """Numbers of pages that hold something that cannot be read, once `rows` has ended."""
    _steps: int = 0
    """Pages of long rows that were followed, so that not even a crafted file takes for ever."""

    @property
    def num_pages(self) -> int:
        return -(-len(self.data) // self.page_bytes)

    def rows(self) -> Iterator[Row]:
        """Every row of every leaf, in the order of pages; what cannot be read is left out."""
        used: set[int] = set()
        unknown: set[int] = set()
        for number in range(1, self.num_pages + 1):
            page = self._page(number)
            start = 100 if number == 1 else 0
            if page[start] in (_TABLE_LEAF, _INDEX_LEAF, _INDEX_INNER):
                yield from self._cells(number, page, start, used)
            elif page[start] != _TABLE_INNER and any(page):
                unknown.add(number)
        # A page of no known kind may be the rest of a long row.
        self.unreadable |= unknown - used - self._free()

    def _page(self, number: int) -> bytes:
        start = (number - 1) * self.page_bytes
        page = bytes(self.data[start : start + self.page_bytes])
        if len(page) < self.page_bytes:
            self.unreadable.add(number)
        return page.ljust(self.page_bytes, b"\0")

    def _free(self) -> set[int]:
        """Pages of the list of free ones: their numbers are all they hold."""
        found: set[int] = set()
        number = int.from_bytes(bytes(self.data[32:36]), "big")
        while 0 < number <= self.num_pages and number not in found:
            found.add(number)
            number = int.from_bytes(self._page(number)[:4], "big")
        return found

    def _cells(self, number: int, page: bytes, start: int, used: set[int]) -> Iterator[Row]:
        kind = page[start]
        count = int.from_bytes(page[start + 3 : start + 5], "big")
        pointers = start + (12 if kind == _INDEX_INNER else 8)
        if pointers + 2 * count > len(page):
            self.unreadable.add(number)
            return
        for place in range(pointers, pointers + 2 * count, 2):
            cell = int.from_bytes(page[place : place + 2], "big")
            try:
                if cell < pointers + 2 * count:
                    raise ValueError("a cell among the pointers")
                yield self._cell(page, cell, kind, used)
            except (ValueError, IndexError):
                self.unreadable.add(number)

    def _cell(self, page: bytes, place: int, kind: int, used: set[int]) -> Row:
        if kind == _INDEX_INNER:
            place += 4
        size, place = _varint(page, place)
        rowid = None
        if kind == _TABLE_LEAF:
            rowid, place = _varint(page, place)
            if rowid >= 1 << 63:
                rowid -= 1 << 64
        most = self.page_bytes - 35
        if kind != _TABLE_LEAF:
            most = (self.page_bytes - 12) * 64 // 255 - 23
        local = size
        if size > most:
            least = (self.page_bytes - 12) * 32 // 255 - 23
            local = least + (size - least) % (self.page_bytes - 4)
            local = local if local <= most else least
        if size > len(self.data) or place + local > len(page):
            raise ValueError("a row larger than its place")
        payload = page[place : place + local]
        if size > local:
            after = int.from_bytes(page[place + local : place + local + 4], "big")
            payload += self._overflow(after, size - local, used)
        return Row(rowid, _record(payload))

    def _overflow(self, number: int, size: int, used: set[int]) -> bytes:
        """The rest of a long row: a chain of pages that no other row uses."""
        parts: list[bytes] = []
        chain: set[int] = set()
        while size > 0:
            self._steps += 1
            if not 1 < number <= self.num_pages or number in used or number in chain:
                raise ValueError("a chain that leads nowhere")
            if self._steps > 8 * self.num_pages + 1000:
                raise ValueError("chains without end")
            chain.add(number)
            page = self._page(number)
            parts.append(page[4 : 4 + size])
            size -= len(parts[-1])
            number = int.from_bytes(page[:4], "big")
        if number:
            raise ValueError("a chain that does not end")
        used |= chain
        return b"".join(parts)


def page_bytes_of(header: bytes) -> int:
    """The size of pages that the header of a file names, or that of ours if it is none."""
    size = int.from_bytes(header[16:18], "big")
    size = 65536 if size == 1 else size
    is_size = 512 <= size <= 65536 and size & (size - 1) == 0
    return size if is_size and header.startswith(b"SQLite format 3\0") else PAGE_BYTES


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for count in range(9):
        byte = data[place + count]
        if count == 8:
            return (value << 8) | byte, place + 9
        value = (value << 7) | (byte & 0x7F)
        if byte < 0x80:
            return value, place + count + 1
    raise AssertionError


def _record(payload: bytes) -> tuple[Column, ...]:
    """The columns of a record. Raises ValueError or IndexError for what is none."""
    header, place = _varint(payload, 0)
    if not place < header <= len(payload):
        raise ValueError("no record")
    columns: list[Column] = []
    body = header
    while place < header:
        kind, place = _varint(payload, place)
        if kind < 10:
            size = _INT_BYTES[kind] if kind < 7 else 8 if kind == 7 else 0
        elif kind < 12:
            raise ValueError("a column of no known kind")
        else:
            size = (kind - 12) // 2
        part = payload[body : body + size]
        if len(part) != size:
            raise ValueError("a column past the end")
        body += size
        columns.append(_column(kind, part))
    if place != header or body != len(payload):
        raise ValueError("a record of another length")
    return tuple(columns)


def _column(kind: int, part: bytes) -> Column:
    if kind == 0:
        return None
    if kind < 7:
        return int.from_bytes(part, "big", signed=True)
    if kind == 7:
        return 0.0  # no table of ours holds a fraction
    if kind < 10:
        return kind - 8
    return part.decode("utf-8", "surrogateescape") if kind % 2 else part
