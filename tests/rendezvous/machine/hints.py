"""Receivers say where they cut; publishers take one layout epoch."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule
from tests.rendezvous.machine.shadow import GROUPS, HOUR_S, MODEL, Shadow, refused

from reshard.rendezvous import hints
from reshard.rendezvous.errors import StaleError
from reshard.rendezvous.records import Hint


class HintRules(Shadow):
    @rule(member=st.sampled_from("abc"), digest=st.integers(0, 2))
    def put_hint(self, member: str, digest: int) -> None:
        group = next(name for name, members in GROUPS.items() if member in members)
        layout_epoch, newest = self.hints[-1]
        mine = (group, member)
        if newest.get(mine) != bytes([digest]) * 32:
            layout_epoch += 1
            others = {of: cut for of, cut in newest.items() if of == mine or not self.hint_is_forgotten(of)}
            self.hints.append((layout_epoch, others | {mine: bytes([digest]) * 32}))
            self.said_at[mine] = self.now
        elif self.said_at[mine] + HOUR_S <= self.now:
            self.said_at[mine] = self.now
        hint = Hint(group, member, bytes([digest]) * 32)
        assert self.run(lambda view: hints.put_hint(view, MODEL, hint)) == layout_epoch
        self.used_at = self.now

    def hint_is_forgotten(self, of: tuple[str, str]) -> bool:
        """Said over an hour ago, by a member of a group of which no transaction is kept."""
        kept = any(txn.group == of[0] and not txn.forgotten for txn in self.transactions.values())
        return not kept and self.said_at[of] + HOUR_S <= self.now

    @rule(back=st.integers(-1, 12))
    def get_hints(self, back: int) -> None:
        """The newest sets and the empty one are there; all ranks that take one layout epoch get one set."""
        wanted = self.hints[-1][0] - back
        known = dict([self.hints[0], *self.hints[-8:]])
        if wanted not in known:
            refused(StaleError, lambda: self.run(lambda view: hints.get_hints(view, MODEL, wanted)))
            return
        found = self.run(lambda view: hints.get_hints(view, MODEL, None if back == 0 else wanted))
        assert found.layout_epoch == wanted
        assert {(hint.group, hint.member): hint.digest for hint in found.hints} == known[wanted]
