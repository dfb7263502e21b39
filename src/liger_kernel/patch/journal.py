"""Changes that can be taken back: attributes of single modules, and names that the whole process shares."""

import dataclasses
import weakref


class MISSING:
    """Stands for an attribute that was not there. (A class, so that copies of a model still know it.)"""


UNDO = "_liger_undo"  # in a patched module's dict: {attribute: (old, new)}


def still_calls(function, ours):
    """Whether `function` is `ours`, bound or not, or was made from it with functools.wraps."""
    while function is not None:
        if getattr(function, "__func__", function) is ours:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def set_on_module(module, name, value):
    """Sets an attribute in the module's own dict and remembers what it hides. -> whether that changed anything."""
    current = module.__dict__.get(name, MISSING)
    if current == value:
        return False
    undo = module.__dict__.setdefault(UNDO, {})
    undo[name] = (undo[name][0] if name in undo else current, value)
    module.__dict__[name] = value
    return True


def restore_module(module, *names):
    """Takes back `set_on_module`, of every attribute or of `names`. -> (restored, names left: other code has replaced them since)"""
    undo, left = module.__dict__.get(UNDO, {}), []
    found = [name for name in names or list(undo) if name in undo]
    for name in found:
        old, new = undo.pop(name)
        if module.__dict__.get(name, MISSING) != new:
            left.append(name)
        elif old is MISSING:
            del module.__dict__[name]
        else:
            module.__dict__[name] = old
    if not undo:
        module.__dict__.pop(UNDO, None)
    return bool(found), left


@dataclasses.dataclass
class _Shared:
    """One replaced name of a class or a module, and who wants it replaced."""

    owner: object
    name: str
    old: object
    new: object
    types: set = dataclasses.field(default_factory=set)
    models: weakref.WeakSet = dataclasses.field(default_factory=weakref.WeakSet)

    def in_place(self):
        return vars(self.owner).get(self.name, MISSING) is self.new


_shared = []


def set_shared(owner, name, value, user):
    """Replaces `owner.name` for the whole process on behalf of `user`, a row's name or a model. -> whether it changed."""
    _shared[:] = [entry for entry in _shared if entry.in_place() or entry.owner is not owner or entry.name != name]  # overwritten since
    entry = next((e for e in _shared if e.owner is owner and e.name == name), None)
    changed = entry is None
    if changed:
        old = vars(owner).get(name, MISSING)
        if old is value:
            return False
        entry = _Shared(owner, name, old, value)
        _shared.append(entry)
        setattr(owner, name, value)
    (entry.types if isinstance(user, str) else entry.models).add(user)
    return changed


def replaced_by_us(owner, name):
    """What `owner.name` was before it was replaced, or None if it is not replaced."""
    return next((e.old for e in _shared if e.owner is owner and e.name == name and e.in_place()), None)


def restore_shared(user=None, owner=None, *names):
    """Withdraws `user`'s wish, or (None) everybody's, for everything or for what `owner` has (under `names`); what nobody wants
    replaced any more goes back. -> names restored"""
    restored = []
    for entry in reversed([e for e in _shared if owner in (None, e.owner) and (not names or e.name in names)]):
        if user is None:
            entry.types.clear()
            entry.models.clear()
        else:
            (entry.types if isinstance(user, str) else entry.models).discard(user)
        if entry.types or len(entry.models):
            continue
        _shared.remove(entry)
        if not entry.in_place():
            continue
        if entry.old is MISSING:
            delattr(entry.owner, entry.name)
        else:
            setattr(entry.owner, entry.name, entry.old)
        restored.append(f"{entry.owner.__name__}.{entry.name}")
    return restored
