"""Changes that can be taken back: attributes of single modules, and names that the whole process shares."""

import dataclasses
import weakref


class MISSING:
    """Stands for an attribute that was not there. (A class, so that copies of a model still know it.)"""


_UNDO = "_liger_undo"  # in a patched module's dict: {attribute: (old, new)}


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
    undo = module.__dict__.setdefault(_UNDO, {})
    undo[name] = (undo[name][0] if name in undo else current, value)
    module.__dict__[name] = value
    return True


def restore_module(module):
    """Takes back every `set_on_module`. -> (restored, names left because other code has replaced them since)"""
    undo = module.__dict__.pop(_UNDO, {})
    left = []
    for name, (old, new) in undo.items():
        if module.__dict__.get(name, MISSING) != new:
            left.append(name)
        elif old is MISSING:
            del module.__dict__[name]
        else:
            module.__dict__[name] = old
    return bool(undo), left


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
    if entry is None:
        old = vars(owner).get(name, MISSING)
        if old is value:
            return False
        entry = _Shared(owner, name, old, value)
        _shared.append(entry)
        setattr(owner, name, value)
        changed = True
    else:
        changed = False
    (entry.types if isinstance(user, str) else entry.models).add(user)
    return changed


def replaced_by_us(owner, name):
    """What `owner.name` was before it was replaced, or None if it is not replaced."""
    return next((e.old for e in _shared if e.owner is owner and e.name == name and e.in_place()), None)


def restore_shared(user=None):
    """Withdraws `user`'s wish, or (None) everybody's; names that nobody wants replaced any more go back. -> names restored"""
    restored = []
    for entry in reversed(_shared[:]):
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
