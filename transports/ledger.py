"""The ledger: which local memory is registered, on whose behalf, and until when.

Registrations count references: lists that share a region may be closed in any order, and memory stays
registered until the last of them is.  A prepared list counts too, apart: once its registration is closed a
region is no longer *served* (it leaves the table, the generation rises), yet it stays registered and alive
until no list can write to it. The same address with another size is another entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from reshard.transports.regions import Region, RegionTable

Key = tuple[int, int, str, int]


@dataclass(slots=True)
class Entry:
    """One registered region; ``native`` is whatever the backend's registration returned."""

    region: Region
    native: object
    registrations: int = 0
    uses: int = 0


class Ledger:
    """Not synchronised: its owner holds a lock.

    Parameters
    ----------
    register : callable
        Registers one region natively and returns a handle, or raises.
    deregister : callable
        Undoes that; it does not raise.
    withdrawn : callable
        Called with the new generation before memory that was served ceases to be.
    """

    def __init__(
        self,
        register: Callable[[Region], object],
        deregister: Callable[[Region, object], None],
        withdrawn: Callable[[int], None],
    ) -> None:
        self._register = register
        self._deregister = deregister
        self._withdrawn = withdrawn
        self._entries: dict[Key, Entry] = {}
        self._table: RegionTable | None = None
        self._listed: list[Entry] = []
        self.generation = 0

    def add(self, regions: Iterable[Region]) -> list[Entry]:
        """Register regions; on a failure none of them stays."""
        added: list[Entry] = []
        try:
            for region in regions:
                if not region.nbytes:
                    continue
                key = (region.address, region.nbytes, region.memory, region.device)
                entry = self._entries.get(key)
                if entry is None:
                    entry = self._entries[key] = Entry(region, self._register(region))
                entry.registrations += 1
                added.append(entry)
                self._invalidate()
        except BaseException:
            # Nobody has seen them served, so the generation stays.
            self._invalidate()
            for entry in added:
                entry.registrations -= 1
                self._drop_if_idle(entry)
            raise
        return added

    def remove(self, entries: Iterable[Entry]) -> None:
        """End one registration of each entry."""
        entries = list(entries)
        for entry in entries:
            entry.registrations -= 1
        if any(not entry.registrations for entry in entries):
            self._invalidate()
            self.generation += 1
            self._withdrawn(self.generation)
            for entry in entries:
                self._drop_if_idle(entry)

    def table(self) -> RegionTable:
        """Return the table of what is served."""
        return self._tabulate()[0]

    def entries(self) -> list[Entry]:
        """Return the served entries, in the order of the table."""
        return self._tabulate()[1]

    def all_entries(self) -> list[Entry]:
        """Return every entry that is natively registered, also those only held by a list."""
        return list(self._entries.values())

    def take_all(self) -> list[Entry]:
        """Forget every entry, and return them to be deregistered; what is released after that is gone already."""
        entries, self._entries = self.all_entries(), {}
        self._invalidate()
        return entries

    def hold(self, entries: Iterable[Entry]) -> None:
        """Count a use of each entry."""
        for entry in entries:
            entry.uses += 1

    def release(self, entries: Iterable[Entry]) -> None:
        """End one use of each entry."""
        for entry in entries:
            entry.uses -= 1
            self._drop_if_idle(entry)

    def _invalidate(self) -> None:
        self._table, self._listed = None, []  # a stale list would keep withdrawn memory alive

    def _tabulate(self) -> tuple[RegionTable, list[Entry]]:
        if self._table is None:
            served = [entry for entry in self._entries.values() if entry.registrations]
            self._listed = sorted(served, key=lambda e: (e.region.address, e.region.nbytes))
            self._table = RegionTable.build(entry.region for entry in self._listed)
        return self._table, self._listed

    def _drop_if_idle(self, entry: Entry) -> None:
        if entry.registrations or entry.uses:
            return
        region = entry.region
        key = (region.address, region.nbytes, region.memory, region.device)
        if self._entries.get(key) is entry:
            del self._entries[key]
            self._deregister(region, entry.native)
