"""What a patch did."""

import dataclasses

from liger_kernel.patch import journal


@dataclasses.dataclass
class Report:
    """Returned by `patch_model` and `patch_classes`; print it.

    Attributes:
        target: what was patched.
        replaced: (where, what it was, what it is now).
        already: the same, for what an earlier call had replaced.
        left: (where, why it was left alone).
    """

    target: str
    replaced: list = dataclasses.field(default_factory=list)
    already: list = dataclasses.field(default_factory=list)
    left: list = dataclasses.field(default_factory=list)

    def changed(self, new, where, was, now):
        (self.replaced if new else self.already).append((where, was, now))

    def leave(self, where, why):
        self.left.append((where, why))

    def off(self, where, why, was, now, *shared):
        """What the call has turned off: left, unless others want one of the `shared` (owner, name) replaced."""
        if any(journal.replaced_by_us(owner, name) for owner, name in shared):
            self.changed(False, where, was, now)
        else:
            self.leave(where, why)

    def __str__(self):
        lines = [self.target]
        for title, rows in (("replaced", self.replaced), ("already replaced", self.already)):
            lines += [f"  {title}: {where}: {was} -> {now}" for where, was, now in rows]
        lines += [f"  left: {where}: {why}" for where, why in self.left]
        return "\n".join(lines)
